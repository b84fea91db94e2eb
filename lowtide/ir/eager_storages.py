"""What eager PyTorch holds for longer than the graph needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lowtide.ir.graph import Graph, Value


@dataclass(frozen=True, eq=False)
class HeldStorages:
    """Gradients, until after the step; and what names in the program or autograd hold on to, until they let go of it."""

    values: tuple[Value, ...] = ()  # to the end
    until: Mapping[str, str] = field(default_factory=dict)  # by storage: the first result of the last node that runs while it is held

    def in_graph(self, graph: Graph) -> HeldStorages:
        names = {value.name for value in self.values}
        return HeldStorages(tuple(value for node in graph.nodes for value in node.results if value.name in names), self.until)


NOTHING_HELD = HeldStorages()
