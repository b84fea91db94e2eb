"""The caller's objects, read and written by slot. Nothing is copied: what is read here is what the caller holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.errors import StepError
from lowtide.ir.graph import Kind, Value
from lowtide.ir.slots import Slot


@dataclass(frozen=True)
class Caller:
    """A model, and perhaps an optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None

    def look(self, batch: Sequence[Any] = ()) -> View:
        """What the caller holds at this moment.

        Looked up anew at each step: `load_state_dict` and assignments may have put other tensors there.
        """
        return View(self, batch, dict(self.model.named_parameters()), dict(self.model.named_buffers()))

    def note_step(self) -> None:
        """Tell learning-rate schedulers that the optimizer has stepped; they warn if it has not before they do."""
        if self.optimizer is not None and getattr(self.optimizer.step, "_wrapped_by_lr_sched", False):
            self.optimizer._opt_called = True  # type: ignore[attr-defined]

    @property
    def state_entries(self) -> int:
        """How many entries the optimizer's state has, of all parameters together."""
        return sum(map(len, self.optimizer.state.values())) if self.optimizer is not None else 0


@dataclass(frozen=True)
class View:
    """The caller's objects by name, at one moment."""

    caller: Caller
    batch: Sequence[Any]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]

    def read(self, slot: Slot, constants: Sequence[torch.Tensor] = ()) -> Any:
        """What a slot holds; `constants` are the tensors that the program closes over. Raises StepError if it is gone."""
        if slot.place == "constant":
            return constants[int(slot.path[0])]
        try:
            return _READERS[slot.place](self, slot.path)
        except (KeyError, IndexError, TypeError) as error:
            raise StepError(f"{slot} was there when the step was captured and is gone now: optimize the model again") from error

    def assign(self, slots: Sequence[Slot], items: Sequence[Any]) -> None:
        """Put new optimizer state where the optimizer looks for it."""
        for slot, item in zip(slots, items, strict=True):
            name, key = slot.path
            self._optimizer.state[self.parameters[str(name)]][key] = item

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        if self.caller.optimizer is None:
            raise StepError("this program was captured without an optimizer")
        return self.caller.optimizer

    def _state(self, path: Any) -> Any:
        return self._optimizer.state[self.parameters[path[0]]][path[1]]

    def _group(self, path: Any) -> Any:
        item: Any = self._optimizer.param_groups[path[0]]
        for key in path[1:]:
            item = item[key]
        return item


_READERS: dict[str, Callable[[View, Any], Any]] = {
    "parameter": lambda view, path: view.parameters[path[0]],
    "buffer": lambda view, path: view.buffers[path[0]],
    "batch": lambda view, path: view.batch[path[0]],
    "state": View._state,
    "group": View._group,
}


@dataclass(frozen=True)
class InputCheck:
    """What the inputs of a graph must look like. Numbers and the batch are checked by whoever takes them in."""

    expected: tuple[tuple[Slot, tuple[Any, ...]], ...]  # one per input; () where there is nothing to check

    @classmethod
    def of(cls, values: Sequence[Value], slots: Sequence[Slot]) -> InputCheck:
        """The check for a graph's inputs."""
        return cls(tuple((slot, _look_of(value)) for value, slot in zip(values, slots, strict=True)))

    def __call__(self, items: Sequence[Any]) -> None:
        """Raise StepError for a tensor that is not what the program was planned for."""
        for (slot, look), item in zip(self.expected, items, strict=True):
            if look and (item.shape, item.stride(), item.dtype, item.device) != look:
                raise StepError(
                    f"{slot} was {describe(*look)} when the step was captured and is "
                    f"{describe(item.shape, item.stride(), item.dtype, item.device)} now: "
                    "optimize the model again"
                )


def describe(shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> str:
    """A tensor's look in words: "float32[8, 3] with strides [3, 1] on cpu"."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} with strides {list(stride)} on {device}"


def _look_of(value: Value) -> tuple[Any, ...]:
    if value.storage.kind in (Kind.SCALAR, Kind.INPUT):
        return ()
    return value.shape, value.stride, getattr(torch, value.dtype), torch.device(value.storage.device)
