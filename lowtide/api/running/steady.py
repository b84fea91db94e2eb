"""The short way for calls of generated kernels: where nothing has changed since the last call, that is seen at once.

A network of a millisecond cannot wait for all that a call looks up otherwise. What the program takes for granted is compared by
identity, as always; the constants of regions by what their networks remember of them, who are not given them again; tensors of the batch
by their looks. All else goes the long way. A frozen function takes this way alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lowtide.api.running.looks import Looks
from lowtide.api.running.variant import Variant
from lowtide.lower.constants import WithoutConstants
from lowtide.lower.python import lower
from lowtide.runtime.caller import View


class Short:
    """A variant's program without what is constant of its regions, on the inputs of a call, of which the batch is replaced."""

    def __init__(self, variant: Variant, inputs: Sequence[Any], networks: Mapping[str, Callable[..., Sequence[Any]]]) -> None:
        short = WithoutConstants.of(variant.decision)
        self.program, self._result = replace(variant.program, source=lower(short), regions=networks), variant.captured.result
        self._inputs = [inputs[at] for at in short.given]
        slots = enumerate(variant.captured.slots[at] for at in short.given)
        self._places = [(at, int(slot.path[0])) for at, slot in slots if slot.table == "batch"]
        for at, _ in self._places:
            self._inputs[at] = None  # a batch is not kept

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """The result for a batch."""
        inputs = self._inputs.copy()
        for at, leaf in self._places:
            inputs[at] = leaves[leaf]
        return self._result(self.program(inputs))


class Steady:
    """One variant on what it ran on last."""

    def __init__(self, variant: Variant, inputs: Sequence[Any], batch: Sequence[Any]) -> None:
        self._granted, self._looks = variant.granted, Looks(batch)
        self.run = Short(variant, inputs, {name: network.again for name, network in variant.networks.items()})

    @classmethod
    def of(cls, variant: Variant, inputs: Sequence[Any], now: View, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Steady | None:
        """The short way for calls like this one; None where there is none."""
        plain = not kwargs and len(args) == len(now.batch)
        same = plain and all(arg is leaf for arg, leaf in zip(args, now.batch, strict=True))
        return cls(variant, inputs, args) if same and is_free(variant) and Looks(args).hold(args, kwargs) else None

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call may go this way."""
        return self._looks.hold(args, kwargs) and self._granted.unmoved()


def is_free(variant: Variant) -> bool:
    """Whether nothing but tensors decides what a program of generated kernels does, and it leaves nothing but its result."""
    captured, program = variant.captured, variant.program
    bound = captured.assigned or captured.guards or captured.readings or variant.shape is not None or program.gradients or program.host
    return bool(variant.networks) and not bound and len(variant.networks) == len(program.regions)
