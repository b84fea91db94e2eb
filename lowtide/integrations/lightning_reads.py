"""What a training step reads of its trainer: noted while it is captured, so that the program serves for as long as that stays as it was."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError

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

    def note(self, text: str, way: Callable[[], Any]) -> Any:
        """The value at the end of a way, which is looked at again at each step."""
        self.values[text] = value = self._ways.setdefault(text, way)()
        return value

    @contextmanager
    def instead_of_the_trainer(self, module: LightningModule) -> Iterator[None]:
        """All is looked at again; modules have a trainer meanwhile of which every read is noted."""
        self.values.update({text: _now(way) for text, way in self._ways.items()})
        modules = [each for each in module.modules() if isinstance(each, LightningModule)]
        trainers = [each.__dict__["_trainer"] for each in modules]
        for each in modules:
            each.__dict__["_trainer"] = self.trainer
        try:
            yield
        finally:
            for each, own in zip(modules, trainers, strict=True):
                each.__dict__["_trainer"] = own


def _now(way: Callable[[], Any]) -> Any:
    try:
        return way()
    except Exception:  # of whatever a property or an item raises: the program has seen it when it was there
        return "not there"


class SeenTrainer:
    """Stands for the trainer, or for what it holds: numbers and texts are noted, what holds them is another one of these."""

    def __init__(self, reads: TrainerReads, text: str, way: Callable[[], Any]) -> None:
        self.__dict__.update(_reads=reads, _text=text, _way=way)

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

    def _further(self, text: str, way: Callable[[], Any]) -> Any:
        found = way()
        if isinstance(found, _AS_IT_IS):
            return found
        return self._noted(text, way) if isinstance(found, _PLAIN) else SeenTrainer(self._reads, text, way)

    def _noted(self, text: str, way: Callable[[], Any]) -> Any:
        return self._reads.note(text, way)
