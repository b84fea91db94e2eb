"""Whether hyper-parameters are still of the sort that a program was captured with: numbers, or tensors that look alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.ir.graph import Graph, Kind, Value
from lowtide.ir.slots import Slot
from lowtide.runtime.caller import looks_like


@dataclass(frozen=True)
class SettingsCheck:
    """What each hyper-parameter that the program reads must be."""

    numbers: tuple[Slot, ...]
    tensors: tuple[tuple[Slot, tuple[Any, ...]], ...]  # shape, strides, dtype, device

    @classmethod
    def of(cls, graph: Graph, slots: Sequence[Slot]) -> SettingsCheck:
        """The check for the inputs of a graph, which `slots` hold."""
        pairs = [(slot, value) for value, slot in zip(graph.inputs, slots, strict=True) if slot.table == "group"]
        numbers = tuple(slot for slot, value in pairs if value.storage.kind is Kind.SCALAR)
        return cls(numbers, tuple((slot, _look(value)) for slot, value in pairs if value.storage.kind is not Kind.SCALAR))

    def hold(self, read: Callable[[Slot], Any]) -> bool:
        """Whether what `read` finds in the slots now is of the same sort."""
        if not all(isinstance(read(slot), (int, float)) for slot in self.numbers):
            return False
        for slot, look in self.tensors:
            item = read(slot)
            if not isinstance(item, torch.Tensor) or not looks_like(item, look):
                return False
        return True


def _look(value: Value) -> tuple[Any, ...]:
    return value.shape, value.stride, getattr(torch, value.dtype), torch.device(value.storage.device)
