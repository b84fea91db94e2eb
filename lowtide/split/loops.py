"""Regions of one graph as loops: each is split once and its body put in order once, however many trees it is in.

So a graph for a tree of splits is put together from loops that are known, and what one costs is known by its body and the size of a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from lowtide.cost.bodies import workspaces_within
from lowtide.cost.memory import order_problem, simulate
from lowtide.errors import CheckError
from lowtide.ir.bodies import Loop
from lowtide.ir.graph import Graph, Node
from lowtide.problems.order import OrderProblem
from lowtide.schedule import Best, schedule
from lowtide.split.dimensions import Dimensions
from lowtide.split.names import AlikeParts, ComponentTable
from lowtide.split.rewrite import SetLoop, looped, takes, with_loops
from lowtide.split.roles import Split
from lowtide.split.sets import FissionTree, Regions, SplitRegion

_ORDERED_AT = 8  # parts for whose size a body is ordered


class Loops:
    """The loops of one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.regions = Regions(Dimensions.of(graph))
        self._known: dict[tuple[int, int], SetLoop | None] = {}

    def graph_of(self, tree: FissionTree) -> Graph:
        """The graph with loops in the places of all that a tree splits. Raises CheckError where that cannot be."""
        split = [self.divided(tree.regions[number], tree.parts[number]) for number in tree.split]
        return with_loops(self.graph, split, self.regions.before).graph if split else self.graph

    def divided(self, region: SplitRegion, parts: int) -> SetLoop:
        """A region as a loop of so many parts. Raises CheckError where it cannot be one."""
        known = self.looped(region)
        if known is None:
            raise CheckError(f"fission: expected a set that can run in parts, got one of {len(region.axes)} nodes that cannot")
        return known.with_loop(divided(known.loop, parts))

    def looped(self, region: SplitRegion) -> SetLoop | None:
        """A region as a loop of some parts; None where it cannot be one."""
        key = region.component, region.bits
        if key not in self._known:
            axes = {self.graph.nodes[place]: axis for place, axis in region.axes.items()}
            name = self._name(region)
            try:
                rewritten = looped(self.graph, Split(axes, name), min(_ORDERED_AT, region.units), self.regions.before)
                self._known[key] = rewritten.with_loop(with_ordered_body(rewritten.loop))
            except CheckError:
                self._known[key] = None
        return self._known[key]

    def _name(self, region: SplitRegion) -> str:
        """What people call what a region is cut along: "batch", and "tokens" where it is cut between those, too."""
        line = self._lines.get(region.component)
        if line is None:
            return "part"
        name = line.name.split(" ")[0]
        return "tokens" if name == "batch" and isinstance(line.least, int) and region.units > line.least else name

    @cached_property
    def _lines(self) -> dict[int, AlikeParts]:
        """By part of the dimension graph, how it is told."""
        lines = ComponentTable.of(self.regions.dimensions).lines
        return {component: line for line in lines for component in line.components}


def divided(node: Node, parts: int) -> Node:
    """A loop cut into so many parts, of which the last may be smaller."""
    loop = Loop.of(node)
    assert isinstance(loop.extent, int)
    part = -(-loop.extent // min(parts, loop.extent))
    dimension = replace(loop.body.dimensions[0], most=part)
    return replace(node, kwargs=tuple((dict(node.kwargs) | {"part": part}).items()), body=replace(loop.body, dimensions=(dimension,)))


def with_ordered_body(node: Node) -> Node:
    """A loop with the nodes of its body in an order of low peak."""
    loop = Loop.of(node)
    body = loop.at(loop.part)
    problem = order_problem(body, workspaces_within(body.nodes))
    order = min((schedule(problem, Best()).order, tuple(range(len(body.nodes)))), key=lambda each: _peak_bytes(problem, each))
    ordered = replace(node, body=replace(loop.body, nodes=tuple(loop.body.nodes[index] for index in order)))
    return replace(ordered, inplace=takes(ordered))


def _peak_bytes(problem: OrderProblem, order: Sequence[int]) -> int:
    return simulate(problem, order).peak_bytes
