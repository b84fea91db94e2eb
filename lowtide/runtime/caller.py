"""The caller's objects, read and written by slot. Nothing is copied: what is read here is what the caller holds.

Hooks on the optimizer's step run around the captured one; what they would see or change too early or too late is refused. One before the
step runs before the forward pass has: it may change hyper-parameters, which the step then reads, and what the program does not know of;
not parameters, buffers, state or the random generator. Gradients are gone where a hook could look at them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import TorchFunctionMode

from lowtide.base.places import Position, Sum
from lowtide.base.skeleton import at, leaves, put
from lowtide.errors import BatchError, StepError
from lowtide.ir.graph import Graph, Kind, Slot, Storage, Value
from lowtide.ir.result_specs import same_strides
from lowtide.kernels.optimizers import each_of


@dataclass(frozen=True)
class OwnHook:
    """A hook of lowtide's own before the optimizer's step: captured steps do not run it."""


_ALONE = 2  # users of a storage that one tensor lies on: that, and who asks


@dataclass(frozen=True)
class Caller:
    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    scaler: torch.amp.GradScaler | None = None
    counters: tuple[Callable[[], None], ...] = ()  # called after each step, also one that the scaler skipped

    def view(self, batch: Sequence[Any] = ()) -> View:
        """What the caller holds at this moment.

        Looked up anew at each step: `load_state_dict` and assignments may have put other tensors there.
        """
        return View(self, batch, dict(self.model.named_parameters()), dict(self.model.named_buffers()))

    def begin_step(self) -> None:
        """What a loop does around a step besides: gradients left from elsewhere go, as in zero_grad; hooks that precede the step run."""
        if self.optimizer is None:
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        scaling = self.scaler is not None and self.scaler._enabled
        if self.scaler is not None and scaling and self.scaler._scale is None:
            self.scaler._lazy_init_scale_growth_tracker(next(self.model.parameters()).device)
        for each in each_of(self.optimizer):
            run_before(self.model, each, may_skip=scaling)

    def end_step(self, stepped: bool) -> None:
        """Learning-rate schedulers learn that the optimizer has stepped (they warn if it has not before they do); hooks run that follow."""
        for count in self.counters:
            count()
        if self.optimizer is None or not stepped:
            return
        for each in each_of(self.optimizer):
            if getattr(each.step, "_wrapped_by_lr_sched", False):
                each._opt_called = True  # type: ignore[attr-defined]
            run_after(each)

    @property
    def state_entries(self) -> int:
        """How many entries the optimizer's state has, of all parameters together."""
        if self.optimizer is None:
            return 0
        return sum(1 if isinstance(key, str) else len(entries) for key, entries in self.optimizer.state.items())


@dataclass(frozen=True)
class View:
    """The caller's objects by name, at one moment."""

    caller: Caller
    batch: Sequence[Any]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]

    def read(self, slot: Slot, constants: Sequence[Any] = ()) -> Any:
        """What a slot holds; `constants` are the tensors that the program closes over. Raises StepError if it is gone."""
        if slot.table == "constant":
            item = constants[int(slot.path[0])]
            if not isinstance(item, Position):
                return item.now if isinstance(item, Sum) else item
            if not isinstance(tensor := item.now(), torch.Tensor):
                raise ChangedError(f"{item.text} was a tensor when the step was captured and is none now")
            return tensor
        try:
            return _READERS[slot.table](self, slot.path)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ChangedError(f"{slot} was there when the step was captured and is gone now") from error

    def set_apart(self, slots: Sequence[Slot], constants: Sequence[torch.Tensor]) -> None:
        """Give tensors memory of their own where others look at theirs, who keep it as it is."""
        for slot in slots:
            tensor = self.read(slot, constants)
            if torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > _ALONE or (tensor.is_cpu and tensor.is_shared()):
                tensor.data = tensor.data.clone()

    def assign(self, slots: Sequence[Slot], items: Sequence[Any], constants: Sequence[torch.Tensor] = ()) -> None:
        """Put new optimizer state where the optimizer looks for it, new buffers and attributes into their modules, data into tensors."""
        for slot, item in zip(slots, items, strict=True):
            if slot.table == "early":
                continue
            if slot.table == "state":
                put(self._optimizer.state[self.parameters[str(slot.path[0])]], slot.path[1:], item)
            elif slot.table == "optimizer":
                put(vars(each_of(self._optimizer)[int(slot.path[0])]), slot.path[1:], item)
            elif slot.table == "group":
                put(self._optimizer.param_groups, slot.path, item)
            elif slot.table == "data":
                self.read(Slot(str(slot.path[0]), slot.path[1:]), constants).data = item
            elif slot.table == "requires_grad":
                self.read(Slot(str(slot.path[0]), slot.path[1:]), constants).requires_grad_(item)
            else:
                module, name = self._owner(slot.path)
                (module._buffers if slot.table == "buffer" else module.__dict__)[name] = item

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        if self.caller.optimizer is None:
            raise StepError("this program was captured without an optimizer")
        return self.caller.optimizer

    def _owner(self, path: Any) -> tuple[nn.Module, str]:
        """The module that holds "layer1.mean", and its name there."""
        module, _, name = path[0].rpartition(".")
        return self.caller.model.get_submodule(module), name

    def _attribute(self, path: Any) -> Any:
        module, name = self._owner(path)
        return module.__dict__[name]

    def _state(self, path: Any) -> Any:
        return at(self._optimizer.state[self.parameters[path[0]]], path[1:])

    def _of_optimizer(self, path: Any) -> Any:
        return at(getattr(each_of(self._optimizer)[path[0]], path[1]), path[2:])

    def _group(self, path: Any) -> Any:
        return at(self._optimizer.param_groups, path)


_READERS: dict[str, Callable[[View, Any], Any]] = {
    "parameter": lambda view, path: at(view.parameters[path[0]], path[1:]),
    "buffer": lambda view, path: at(view.buffers[path[0]], path[1:]),
    "attribute": View._attribute,
    "batch": lambda view, path: view.batch[path[0]],
    "state": View._state,
    "optimizer": View._of_optimizer,
    "group": View._group,
    "scaler": lambda view, path: getattr(view.caller.scaler, path[0]),
}


class ChangedError(StepError):
    """Something of the caller's looks otherwise than it did when the step was captured: it can be captured anew."""


@dataclass(frozen=True)
class InputCheck:
    """What a graph's inputs must look like, and which of them may share memory. Numbers and the batch's looks are checked elsewhere."""

    expected: tuple[tuple[Slot, tuple[Any, ...]], ...]  # one per input; () where there is nothing to check
    storages: tuple[int | None, ...]  # one per input: which storage it lies on; None for a number
    written: frozenset[int]  # the storages that the program writes

    @classmethod
    def of(cls, graph: Graph, slots: Sequence[Slot]) -> InputCheck:
        numbers: dict[Storage, int] = {}  # the first input on it
        for number, value in enumerate(graph.inputs):
            if value.storage.kind is not Kind.SCALAR:
                numbers.setdefault(value.storage, number)
        written = {before.storage for node in graph.nodes for before, _ in node.writes}
        absolute = {value.storage for node in graph.nodes if "as_strided" in node.op for value in node.inputs}
        alike = Counter((value.storage, value.dtype, value.shape, value.stride, value.offset) for value in graph.inputs)
        absolute.update(where[0] for where, count in alike.items() if count > 1)  # they are one value of the program
        return cls(
            tuple((slot, _look_of(value, value.storage in absolute)) for value, slot in zip(graph.inputs, slots, strict=True)),
            tuple(numbers.get(value.storage) for value in graph.inputs),
            frozenset(number for storage, number in numbers.items() if storage in written),
        )

    def __call__(self, items: Sequence[Any]) -> None:
        """Raise ChangedError for a tensor that looks otherwise than it did, BatchError for a batch that shares memory with one."""
        for (slot, layout), item in zip(self.expected, items, strict=True):
            if layout and not (isinstance(item, torch.Tensor) and looks_like(item, layout[:4])):
                tensor = isinstance(item, torch.Tensor)
                got = describe(item.shape, item.stride(), item.dtype, item.device) if tensor else f"a {type(item).__name__}"
                raise ChangedError(f"{slot} was {describe(*layout[:4])} when the step was captured and is {got} now")
            if layout and layout[4] is not None and item.storage_offset() != layout[4]:
                raise ChangedError(f"{slot} began at element {layout[4]} of its storage and begins at {item.storage_offset()} now")
        self._check_sharing(items)

    def _check_sharing(self, items: Sequence[Any]) -> None:
        """The order of operators rests on who shares memory with whom: what is written must share as it did."""
        storage_at: dict[int, int] = {}
        address_of: dict[int, int] = {}
        for (slot, _), number, item in zip(self.expected, self.storages, items, strict=True):
            if number is None or not (address := item.untyped_storage().data_ptr()):
                continue
            other = storage_at.setdefault(address, number)
            if other != number and (other in self.written or number in self.written):
                written = self.expected[other if other in self.written else number][0]
                self._refuse(
                    slot,
                    f"shares its memory with {self.expected[other][0]}, and the step, captured as if it did not, writes {written}: "
                    "compute out of place in the loss (`x = x + 1` for `x.add_(1)`), or pass a copy (`.clone()`), which no write reaches",
                )
            if address_of.setdefault(number, address) != address:
                self._refuse(slot, f"shared its memory with {self.expected[number][0]} when the step was captured")

    def _refuse(self, slot: Slot, why: str) -> NoReturn:
        raise BatchError(f"{slot} {why}") if slot.table == "batch" else ChangedError(f"{slot} {why}")


def looks_like(item: torch.Tensor, layout: tuple[Any, ...]) -> bool:
    """Whether a tensor has a shape, strides, dtype and device. Strides that mean nothing may differ."""
    shape, stride, dtype, device = layout
    if (item.shape, item.dtype, item.device) != (shape, dtype, device):
        return False
    return item.stride() == stride or same_strides(shape, item.stride(), stride)


def describe(shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> str:
    """A tensor's look in words: "float32[8, 3] with strides [3, 1] on cpu"."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} with strides {list(stride)} on {device}"


def layout_of(value: Value) -> tuple[Any, ...]:
    """As `looks_like` compares it: shape, strides, dtype, device."""
    return value.shape, value.stride, getattr(torch, value.dtype), torch.device(value.storage.device)


def _look_of(value: Value, absolute: bool) -> tuple[Any, ...]:
    """The layout; and the offset, where the program counts elements from the start of the storage."""
    if value.storage.kind in (Kind.SCALAR, Kind.INPUT):
        return ()
    return (*layout_of(value), value.offset if absolute else None)


def run_before(model: nn.Module, optimizer: torch.optim.Optimizer, may_skip: bool = False) -> None:
    """Run the hooks that precede the step. Raises StepError for one that does what it could not do in time."""
    hooks = [*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()]
    hooks = [hook for hook in hooks if not isinstance(hook, OwnHook)]
    if not hooks:
        return
    if may_skip:
        raise StepError(
            "hooks before the optimizer's step run only if a gradient scaler does not skip it, which is not known yet: remove them"
        )
    before = _versions(model, optimizer), torch.get_rng_state()
    with _NoGradients(optimizer):
        for hook in hooks:
            if hook(optimizer, (optimizer,), {}) is not None:
                name = getattr(hook, "__name__", type(hook).__name__)
                raise StepError(f"hook {name} before the optimizer's step returns other arguments for it, which a captured step has not")
    if _versions(model, optimizer) != before[0] or not torch.equal(torch.get_rng_state(), before[1]):
        raise StepError(
            f"a hook before the step of {type(optimizer).__name__} changes parameters, buffers, optimizer state or the random generator. A "
            "captured step runs such hooks before its forward pass, which would see the change too early: use after_backward"
        )


@contextmanager
def already_run(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The optimizer's own step runs no hooks before it meanwhile."""
    tables: list[dict[Any, Any]] = [_global_optimizer_pre_hooks, *(each._optimizer_step_pre_hooks for each in each_of(optimizer))]
    tables_before = [dict(table) for table in tables]
    try:
        for table in tables:
            table.clear()
        yield
    finally:
        for table, hooks in zip(tables, tables_before, strict=True):
            table.update(hooks)


def run_after(optimizer: torch.optim.Optimizer) -> None:
    hooks = [*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()]
    if not hooks:
        return
    with _NoGradients(optimizer):
        for hook in hooks:
            hook(optimizer, (optimizer,), {})


class _NoGradients(TorchFunctionMode):
    """Raises where a hook asks for a gradient, which eager PyTorch would still have."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func == _READS_GRADIENT and id(args[0]) in self.trained:
            raise StepError(
                "a hook on the optimizer's step reads a parameter's gradient, which a captured step has used and let go: use after_backward"
            )
        return func(*args, **(kwargs or {}))


_READS_GRADIENT = vars(torch._C.TensorBase)["grad"].__get__


def _versions(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """What tells that a tensor of the caller's was written or replaced."""
    state = (item for entries in optimizer.state.values() for _, item in leaves(entries))
    tensors = (item for item in chain(model.parameters(), model.buffers(), state) if isinstance(item, torch.Tensor))
    return [(id(tensor), tensor._version) for tensor in tensors]
