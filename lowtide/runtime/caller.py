"""The caller's objects, read and written by slot. Nothing is copied: what is read here is what the caller holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.errors import StepError
from lowtide.ir.graph import Kind, Value
from lowtide.ir.slots import Slot


@dataclass(frozen=True)
class Caller:
    """A model, perhaps an optimizer, and the tensors that a program closes over."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    constants: tuple[torch.Tensor, ...]

    def read_all(self, slots: Sequence[Slot], batch: Sequence[Any]) -> list[Any]:
        """What the slots hold now. Looked up anew at each step: `load_state_dict` and `.data = ` may have put other tensors there.

        Raises StepError if something is gone.
        """
        parameters = dict(self.model.named_parameters())
        buffers: dict[str, torch.Tensor] | None = None
        found: list[Any] = []
        try:
            for slot in slots:
                if slot.place == "buffer" and buffers is None:
                    buffers = dict(self.model.named_buffers())
                found.append(self._read(slot, parameters, buffers or {}, batch))
        except (KeyError, IndexError) as error:
            raise StepError(f"{slot} was there at capture and is gone: optimize the model again") from error
        return found

    def read(self, slot: Slot) -> Any:
        """What one slot of the optimizer holds now: a hyper-parameter, or a number of its state. KeyError or IndexError if it is gone."""
        return self._read(slot, dict(self.model.named_parameters()) if slot.place == "state" else {}, {}, ())

    def _read(self, slot: Slot, parameters: dict[str, Any], buffers: dict[str, Any], batch: Sequence[Any]) -> Any:
        path: Any = slot.path
        if slot.place == "parameter":
            return parameters[path[0]]
        if slot.place == "buffer":
            return buffers[path[0]]
        if slot.place == "batch":
            return batch[path[0]]
        if slot.place == "constant":
            return self.constants[path[0]]
        assert self.optimizer is not None
        item: Any = self.optimizer.state.get(parameters[path[0]], {}) if slot.place == "state" else self.optimizer.param_groups[path[0]]
        for key in path[1:]:
            item = item[key]
        return item

    def assign(self, slots: Sequence[Slot], items: Sequence[Any]) -> None:
        """Put new optimizer state where the optimizer looks for it."""
        if not slots:
            return
        assert self.optimizer is not None
        parameters: dict[Any, Any] = dict(self.model.named_parameters())
        for slot, item in zip(slots, items, strict=True):
            name, key = slot.path
            self.optimizer.state[parameters[name]][key] = item


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
                    f"{slot} was {_describe(*look)} when the step was captured and is {_describe(item.shape, item.stride(), item.dtype, item.device)} now: "
                    "optimize the model again"
                )


def _look_of(value: Value) -> tuple[Any, ...]:
    if value.storage.kind in (Kind.SCALAR, Kind.INPUT):
        return ()
    return value.shape, value.stride, getattr(torch, value.dtype), torch.device(value.storage.device)


def _describe(shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} with strides {list(stride)} on {device}"
