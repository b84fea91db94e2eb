"""What eager PyTorch holds for longer than the graph needs it, and what it computes beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lowtide.ir.graph import Graph, Value
from lowtide.ir.shapes.points import at


@dataclass(frozen=True, eq=False)
class HeldStorages:
    """Gradients, until after the step; and what names in the program or autograd hold on to, until they let go of it."""

    values: tuple[Value, ...] = ()  # to the end
    until: Mapping[str, str] = field(default_factory=dict)  # by storage: the first result of the last node that runs while it is held
    summed: frozenset[str] = frozenset()  # sums of gradients, and of branches: where the first of their inputs that dies lay
    program: Graph | None = None  # with what nothing needs and eager computes all the same; None where that is nothing
    point: Mapping[str, int] | None = None  # at which it is meant

    def at(self, point: Mapping[str, int]) -> HeldStorages:
        """The same of a program over dimensions, at a point."""
        return replace(self, point=point)

    def whole(self, graph: Graph) -> Graph:
        """The program as eager runs it, whose graph is this one. What is held to the end is among its outputs."""
        if self.program is not None:
            graph = self.program if self.point is None else at(self.program, self.point)
        names = {value.name for value in self.values}
        held = (value for node in graph.nodes for value in node.results if value.name in names)
        return replace(graph, outputs=(*graph.outputs, *held))


NOTHING_HELD = HeldStorages()
