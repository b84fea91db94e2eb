"""Slots: where the caller keeps what a graph reads. Pure data, so that a plan can name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Path: TypeAlias = "tuple[str | int, ...]"


@dataclass(frozen=True, slots=True)
class Slot:
    """One place in the caller's program: `table` says of which kind, `path` where among those.

    parameter, buffer  (name,)                         of the model, "layer1.0.conv1.weight"
    attribute          (name,)                         a plain tensor of a module, "layer1.memory"
    state              (parameter's name, key)         of the optimizer: a tensor or a number
    group              (group's index, key[, index])   a hyper-parameter
    scaler             (attribute,)                    of the gradient scaler
    batch              (leaf's index,)
    constant           (index,)                        a tensor that the program closes over, or a generator that it draws from
    data               (table, *path)                  the memory of the tensor that lies in another slot
    requires_grad      (table, *path)                  whether that tensor is trained
    """

    table: str
    path: Path

    def __str__(self) -> str:
        return f"{self.table} {'.'.join(map(str, self.path))}"
