"""The short way for calls of generated kernels: where nothing has changed since the last call, that is seen at once.

A network of a millisecond cannot wait for all that a call looks up otherwise. What the program takes for granted is compared by
identity, as always; the constants of regions by what their networks remember of them, who are not given them again; tensors of the batch
by their looks. All else goes the long way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lowtide.api.running.variant import Variant
from lowtide.ir.made import same_strides
from lowtide.lower.constants import WithoutConstants
from lowtide.lower.python import lower
from lowtide.runtime.caller import View


class Steady:
    """One variant on the inputs of its last call, of which the batch is replaced."""

    def __init__(self, variant: Variant, inputs: Sequence[Any], batch: Sequence[Any]) -> None:
        short = WithoutConstants.of(variant.decision)
        again = {name: network.again for name, network in variant.networks.items()}
        self._variant, self._program = variant, replace(variant.program, source=lower(short), regions=again)
        self._inputs = [inputs[at] for at in short.given]
        self._looks = [_look(leaf) for leaf in batch]
        slots = enumerate(variant.captured.slots[at] for at in short.given)
        self._places = [(at, int(slot.path[0])) for at, slot in slots if slot.table == "batch"]
        for at, _ in self._places:
            self._inputs[at] = None  # a batch is not kept

    @classmethod
    def of(cls, variant: Variant, inputs: Sequence[Any], now: View, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Steady | None:
        """The short way for calls like this one; None where there is none."""
        captured = variant.captured
        plain = not kwargs and len(args) == len(now.batch) and all(type(arg) is torch.Tensor for arg in args)
        same = plain and all(arg is leaf for arg, leaf in zip(args, now.batch, strict=True))
        program = variant.program
        bound = captured.assigned or captured.guards or captured.readings or variant.shape is not None or program.gradients or program.host
        return cls(variant, inputs, args) if same and not bound and variant.networks else None

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """The program's inputs for a call; None where it has to go the long way."""
        looks = self._looks
        if kwargs or len(args) != len(looks):
            return None
        for arg, (shape, stride, dtype) in zip(args, looks, strict=True):
            if type(arg) is not torch.Tensor or arg.shape != shape or arg.dtype is not dtype or arg.layout is not torch.strided:
                return None
            if (arg.stride() != stride and not same_strides(shape, arg.stride(), stride)) or arg.device.type != "cpu" or _is_lazy(arg):
                return None
        if not self._variant.granted.unmoved():
            return None
        inputs = self._inputs.copy()
        for at, leaf in self._places:
            inputs[at] = args[leaf]
        return inputs

    def run(self, inputs: list[Any]) -> Any:
        """The result."""
        return self._variant.captured.result(self._program(inputs))


def _look(leaf: torch.Tensor) -> tuple[Any, ...]:
    return leaf.shape, leaf.stride(), leaf.dtype


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_neg() or tensor.is_conj()
