"""Programs for calls whose constants are those of the call before: they are given what may differ alone.

takes   a decision whose graph has regions
leaves  one in which regions take nothing that is fixed, and of which inputs that one's are
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowtide.ir.graph import Graph, Node
from lowtide.ir.regions import Region, is_region
from lowtide.plan.contents import Decision


@dataclass(frozen=True, eq=False)
class WithoutConstants:
    """A decision for the rest of a graph's inputs."""

    graph: Graph
    order: tuple[int, ...]
    reuses: tuple[int, ...]
    given: tuple[int, ...]  # which of the inputs it takes

    @classmethod
    def of(cls, decision: Decision) -> WithoutConstants:
        """What decides the same; nothing of it is swapped."""
        graph = decision.graph
        nodes = tuple(_without(node) if is_region(node) else node for node in graph.nodes)
        used = {*graph.outputs, *(value for node in nodes for value in node.inputs)}
        given = tuple(at for at, value in enumerate(graph.inputs) if value in used)
        inputs = tuple(graph.inputs[at] for at in given)
        return cls(replace(graph, inputs=inputs, nodes=nodes), decision.order, decision.reuses, given)


def _without(node: Node) -> Node:
    fixed = set(Region.of(node).fixed)
    args = tuple(arg for at, arg in enumerate(node.args) if at not in fixed)
    return replace(node, args=args, kwargs=tuple((key, () if key == "fixed" else value) for key, value in node.kwargs))
