"""What a training step of Lightning's logs, which metrics it updates, and what it reads of its trainer: noted while it is captured.

The first two are done when a step is over; the program serves for as long as what it has read stays as it was.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric, MetricCollection

from lowtide.api.arguments import detached
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError
from lowtide.ir import tree

_GIVING = ("forward", "compute")
_OF_METRICS = (*_GIVING, "update", "reset")
_POSITION = (
    "training_step uses batch_idx at {}: a captured step is the same for every batch; use a hook of the module or of a callback "
    "(on_train_batch_end) for what is to happen now and then"
)
_OF_A_METRIC = (
    "training_step uses the value of a metric at {}, which is computed when the step is over: give it to self.log as it is, and take a "
    "function of torchmetrics.functional for what goes into the loss"
)


class UnknownValue:
    """Stands for what no program knows: it can be handed on, and refuses to be looked at."""

    def __init__(self, why: str) -> None:
        self._why = why

    def _refuse(self, *others: Any) -> Any:
        raise CaptureError(self._why.format(users_line()))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What each step leaves somewhere is copied, if the program makes it anew."""
        raise CaptureError(self._why.format("a list, an attribute or the like, where it stays"))


for _name in ("bool", "float", "int", "index", "hash", "eq", "ne", "lt", "le", "gt", "ge", "format", "str", "repr", "neg", "add", "radd",
              "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "mod", "rmod", "pow", "rpow", "iter",
              "len", "getitem"):  # fmt: skip
    setattr(UnknownValue, f"__{_name}__", UnknownValue._refuse)


def position() -> UnknownValue:
    """Stands for `batch_idx`, which a program that serves every batch cannot look at."""
    return UnknownValue(_POSITION)


class GivenNote(UnknownValue):
    """Stands for what the note of this number will give."""

    def __init__(self, number: int, key: str | None = None) -> None:
        super().__init__(_OF_A_METRIC)
        self._source = LogSource(number=number, key=key)


@dataclass(frozen=True)
class LogSource:
    """Where the value of a log comes from: a metric of the module, or what a note before it gave."""

    metric: str | None = None
    number: int | None = None
    key: str | None = None

    def value(self, module: nn.Module, given: list[Any]) -> Any:
        if self.number is None:
            return module.get_submodule(self.metric or "")
        return given[self.number] if self.key is None else given[self.number][self.key]


@dataclass(frozen=True)
class LogCall:
    name: str
    value: Any  # a tensor, a number or a Source
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, module: LightningModule, given: list[Any]) -> None:
        """Make that call with the numbers of the step that has just run."""
        value = self.value.value(module, given) if isinstance(self.value, LogSource) else self.value
        module.log(self.name, value, *self.args, **self.kwargs)


@dataclass(frozen=True)
class MetricCall:
    metric: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, module: LightningModule, given: list[Any]) -> Any:
        return getattr(module.get_submodule(self.metric), self.method)(*self.args, **self.kwargs)


@dataclass
class Notes:
    """What a program has done beside, in its order."""

    module: LightningModule
    calls: list[LogCall | MetricCall] = field(default_factory=list)

    @contextmanager
    def taken(self) -> Iterator[list[LogCall | MetricCall]]:
        """Notes are taken meanwhile; none of it is done."""
        with _instead(self.module, {"log": self._log}), _each(self._of_metrics()):
            yield self.calls

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, GivenNote):
            value = value._source
        elif isinstance(value, Metric):
            value = LogSource(metric=self._path_of(value))
        elif isinstance(value, torch.Tensor):
            value = value.detach()
        elif not isinstance(value, (int, float)):
            raise CaptureError(f"self.log({name!r}, ...): expected a tensor, a number or a metric of the module, got {value!r}")
        self.calls.append(LogCall(name, value, args, kwargs))

    def _path_of(self, metric: Metric) -> str:
        path: str
        for path, each in self.module.named_modules():
            if each is metric:
                return path
        raise CaptureError(f"self.log was given a {type(metric).__name__} that is no attribute of the module: keep it in one")

    def _of_metrics(self) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
        for path, each in self.module.named_modules():
            if isinstance(each, (Metric, MetricCollection)):
                noting = {method: self._noting(each, path, method) for method in _OF_METRICS}
                yield each, {**noting, "items": _items(each)} if isinstance(each, MetricCollection) else noting

    def _noting(self, metric: Any, path: str, method: str) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            number = len(self.calls)
            self.calls.append(MetricCall(path, method, *detached(args, kwargs)))
            if method not in _GIVING:
                return None
            if isinstance(metric, MetricCollection):
                return {name: GivenNote(number, str(name)) for name in metric.keys(keep_base=False)}
            return GivenNote(number)

        return noted


def run(notes: list[LogCall | MetricCall], module: LightningModule, hook: str | None = None) -> None:
    """Do what was noted, as if within that hook of the module."""
    within = {} if hook is None else {"_current_fx_name": hook}
    given: list[Any] = []
    with _instead(module, within):
        for note in notes:
            given.append(note.run(module, given))


def refuse_unknown(returned: Any) -> None:
    """Raise CaptureError for a result in which something stands for what is not known."""
    for leaf in tree.flatten(returned)[0]:
        if isinstance(leaf.value, UnknownValue):
            raise CaptureError(
                f"training_step returns batch_idx or the value of a metric in {leaf.where or 'its result'}, which a captured step does not "
                "know: return tensors"
            )


def _items(metrics: MetricCollection) -> Callable[..., Any]:
    """`items` of a collection as `log_dict` asks for them; its own look at what metrics have counted."""

    def items(keep_base: bool = False, copy_state: bool = True) -> Any:
        return dict(zip(metrics.keys(keep_base=keep_base), metrics.children(), strict=True)).items()

    return items


@contextmanager
def _each(put: Iterator[tuple[nn.Module, dict[str, Any]]]) -> Iterator[None]:
    with ExitStack() as stack:
        for module, attributes in list(put):
            stack.enter_context(_instead(module, attributes))
        yield


@contextmanager
def _instead(module: nn.Module, attributes: Mapping[str, Any]) -> Iterator[None]:
    """A module with other attributes meanwhile; afterwards its own lie where they lay."""
    before = dict(module.__dict__)
    module.__dict__.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            if name in before:
                module.__dict__[name] = before[name]
            else:
                module.__dict__.pop(name, None)


_PLAIN = (bool, int, float, str, bytes, type(None), enum.Enum, torch.device, torch.dtype)
_EACH_READS = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
_AS_IT_IS = (torch.Tensor, nn.Module, type)
# They give what a step may rest on, or do with one device what is the same at each step.
_ANSWERS = frozenset({"get_last_lr"})
_CALLED = frozenset({"all_gather", "reduce", "barrier", "clip_gradients"})


class TrainerReads:
    """What was read, by how it is written in Python, as it was when last looked at."""

    def __init__(self, trainer: Any) -> None:
        self.values: dict[str, Any] = {}
        self._ways: dict[str, Callable[[], Any]] = {}
        self.trainer = SeenTrainer(self, "trainer", lambda: trainer)
        for name in _EACH_READS:  # what is read first by a program has it captured twice
            getattr(self.trainer, name)

    def note(self, text: str, read: Callable[[], Any]) -> Any:
        """The value at the end of a way, which is looked at again at each step."""
        self.values[text] = value = self._ways.setdefault(text, read)()
        return value

    @contextmanager
    def instead_of_the_trainer(self, module: LightningModule) -> Iterator[None]:
        """All is looked at again; modules have a trainer meanwhile of which every read is noted."""
        self.values.update({text: _now(read) for text, read in self._ways.items()})
        modules = [each for each in module.modules() if isinstance(each, LightningModule)]
        trainers = [each.__dict__["_trainer"] for each in modules]
        for each in modules:
            each.__dict__["_trainer"] = self.trainer
        try:
            yield
        finally:
            for each, own in zip(modules, trainers, strict=True):
                each.__dict__["_trainer"] = own


def _now(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception:  # of whatever a property or an item raises: the program has seen it when it was there
        return "not there"


class SeenTrainer:
    """Stands for the trainer, or for what it holds: numbers and texts are noted, what holds them is another one of these."""

    def __init__(self, reads: TrainerReads, text: str, read: Callable[[], Any]) -> None:
        self.__dict__.update(_reads=reads, _text=text, _way=read)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._way())

    def __getattr__(self, name: str) -> Any:
        return self._further(f"{self._text}.{name}", lambda: getattr(self._way(), name))

    def __getitem__(self, key: Any) -> Any:
        return self._further(f"{self._text}[{key!r}]", lambda: self._way()[key])

    def __len__(self) -> int:
        return int(self._noted(f"len({self._text})", lambda: len(self._way())))

    def __bool__(self) -> bool:
        return bool(self._noted(f"bool({self._text})", lambda: bool(self._way())))

    def __contains__(self, key: Any) -> bool:
        return bool(self._noted(f"{key!r} in {self._text}", lambda: key in self._way()))

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self, dict):
            return iter([key for key in self._way() if key in self])
        return iter([self[at] for at in range(len(self))])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a method, where what that gives is the same at each step; CaptureError for others."""
        name = self._text.rpartition(".")[2]
        if name in _CALLED:
            return self._way()(*args, **kwargs)
        if name in _ANSWERS and not args and not kwargs:
            return self._further(f"{self._text}()", lambda: self._way()())
        raise CaptureError(
            f"training_step calls {self._text} at {users_line()}, which a captured step would do once and never again: use self.log, "
            "return what it needs, and do it in on_train_batch_end"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise CaptureError(
            f"training_step sets {self._text}.{name} at {users_line()}, which a captured step would do once and never again: do it in a "
            "hook (on_train_batch_end)"
        )

    def _further(self, text: str, read: Callable[[], Any]) -> Any:
        item = read()
        if isinstance(item, _AS_IT_IS):
            return item
        return self._noted(text, read) if isinstance(item, _PLAIN) else SeenTrainer(self._reads, text, read)

    def _noted(self, text: str, read: Callable[[], Any]) -> Any:
        return self._reads.note(text, read)
