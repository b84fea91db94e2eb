"""Disjoint sets of nodes that make up a graph, without cycles between them, in an order in which they can run.

How hard operators are to tune: linear in the extents of their loops (AGO, equation 1); a cluster weighs what its operators do.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowtide.ir.edges import predecessors
from lowtide.ir.graph import Graph, Kind, Node
from lowtide.ir.operators.nests import Nest
from lowtide.ir.operators.nodes import nest_of


@dataclass(frozen=True, slots=True)
class LoopWeights:
    """`slope * extent + bias`, summed over the loops of an operator. A view is index arithmetic within the loops of its result.

    The paper gives neither number. These make the mean cluster of MobileViT weigh what its figure 14 says.
    """

    slope: float = 0.1
    bias: float = 1.0

    def of(self, node: Node) -> float:
        """The weight of an operator. Raises CheckError where a shape is symbolic."""
        return self.of_nest(nest_of(node))

    def of_nest(self, nest: Nest) -> float:
        return sum(self.slope * each.extent + self.bias for each in nest.loops)


CONSTANT = {Kind.PARAMETER, Kind.BUFFER, Kind.CONSTANT}


@dataclass(frozen=True, eq=False)
class Partition:
    """Clusters of a graph. What depends on parameters and constants alone is in none: it is computed once, before the first call."""

    graph: Graph
    clusters: tuple[tuple[Node, ...], ...]  # in an order in which they can run; the nodes of each in program order
    constants: tuple[Node, ...]  # in program order
    weights: LoopWeights

    def __repr__(self) -> str:
        return f"Partition of {len(self.graph.nodes)} nodes into {len(self.clusters)} clusters"


def from_sets(graph: Graph, sets: Iterable[Iterable[int]], weights: LoopWeights) -> Partition:
    """A partition of sets of positions that are in order; all other nodes are constants."""
    clusters = tuple(tuple(graph.nodes[at] for at in sorted(members)) for members in sets)
    taken = {node for nodes in clusters for node in nodes}
    return Partition(graph, clusters, tuple(node for node in graph.nodes if node not in taken), weights)


def constant_nodes(graph: Graph) -> frozenset[Node]:
    """Nodes that depend on parameters, buffers and constants alone, none of which is written, and write nothing."""
    written = {before.storage for node in graph.nodes for before, _ in node.writes}
    fixed = {value for value in graph.inputs if value.storage.kind in CONSTANT and value.storage not in written}
    found = set[Node]()
    for node in graph.nodes:
        if node.inputs and not node.writes and not node.after and fixed.issuperset(node.inputs):
            found.add(node)
            fixed.update(value for value in node.results if value.storage not in written)
    return frozenset(found)


def edges_between(graph: Graph, sets: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Pairs (earlier, later) of sets of which the second needs the first, each once; nodes of no set make none."""
    set_of = {at: index for index, members in enumerate(sets) for at in members}
    found: dict[tuple[int, int], None] = {}
    for late, earlier in enumerate(predecessors(graph)):
        for early in earlier:
            pair = set_of.get(early, -1), set_of.get(late, -1)
            if pair[0] != pair[1] and -1 not in pair:
                found[pair] = None
    return list(found)


def ordered(graph: Graph, sets: Sequence[Sequence[int]]) -> list[list[int]]:
    """Sets of positions so that each comes after what it needs, the earliest in program order first. Raises ValueError for a cycle."""
    after: list[list[int]] = [[] for _ in sets]
    waits_for = [0] * len(sets)
    for early, late in edges_between(graph, sets):
        after[early].append(late)
        waits_for[late] += 1
    ready = [(min(members), index) for index, members in enumerate(sets) if not waits_for[index]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(sorted(sets[index]))
        for other in after[index]:
            waits_for[other] -= 1
            if not waits_for[other]:
                heapq.heappush(ready, (min(sets[other]), other))
    if len(order) < len(sets):
        raise ValueError("expected clusters that can run one after another, got some that need one another's results")
    return order
