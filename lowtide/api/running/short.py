"""A program of generated kernels on what a call found before, of which only the batch is another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Protocol

from lowtide.ir.graph import Graph
from lowtide.ir.regions import is_region
from lowtide.ir.slots import Slot
from lowtide.lower.constants import WithoutConstants
from lowtide.lower.python import lower
from lowtide.plan.contents import Decision
from lowtide.runtime.program import Program


class Tied(Protocol):
    """How a program is tied to the caller's objects."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Of its inputs."""

    @property
    def result(self) -> Callable[[Sequence[Any]], Any]:
        """What it returns, of its outputs."""


class Runs(Protocol):
    """A program that was decided about, and is there."""

    @property
    def decision(self) -> Decision:
        """What it follows from."""

    @property
    def program(self) -> Program:
        """What runs."""

    @property
    def captured(self) -> Tied:
        """What it is tied to."""


class Short:
    """A variant's program without what is constant of its regions, on the inputs of a call, of which the batch is replaced."""

    def __init__(self, variant: Runs, inputs: Sequence[Any], networks: Mapping[str, Callable[..., Sequence[Any]]]) -> None:
        short = WithoutConstants.of(variant.decision)
        self.program, self.result = replace(variant.program, source=lower(short), regions=networks), variant.captured.result
        self._inputs = [inputs[at] for at in short.given]
        slots = enumerate(variant.captured.slots[at] for at in short.given)
        self._places = [(at, int(slot.path[0])) for at, slot in slots if slot.table == "batch"]
        for at, _ in self._places:
            self._inputs[at] = None  # a batch is not kept
        self._alone = _alone(short.graph, dict(self._places))

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """The result for a batch."""
        inputs = self._inputs.copy()
        for at, leaf in self._places:
            inputs[at] = leaves[leaf]
        return self.result(self.program(inputs))

    def on(self, networks: Mapping[str, Callable[..., Sequence[Any]]]) -> Short:
        """The same with other calls of its networks."""
        other = copy(self)
        other.program = replace(self.program, regions=networks)
        return other

    def alone(self) -> list[int] | None:
        """Where the program is one region that reads nothing but the batch: which of the batch it reads; None elsewhere."""
        return self._alone


def _alone(graph: Graph, leaves: Mapping[int, int]) -> list[int] | None:
    """The leaves of the batch that the one region of a graph reads; `leaves` are by input."""
    if len(graph.nodes) != 1 or len(leaves) != len(graph.inputs):
        return None
    (node,) = graph.nodes
    if not is_region(node) or node.results != graph.outputs:
        return None
    return [leaves[graph.inputs.index(value)] for value in node.inputs]
