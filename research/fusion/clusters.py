"""Clusters of any structure: AGO, section IV, Algorithm 1.

    parts = partition(graph)
    for cluster in parts.clusters: ...    # nodes in program order, clusters in an order in which they can run

The paper merges operators, and may so cut between an operator and its activation. `partition` merges *units*: a complex operator with the
simple ones around it, what conventional fusion makes one kernel. So no cut makes a kernel that conventional fusion would not have had.
`partition_of_operators` is the paper's own.

Nodes are merged one at a time, and the topological stages kept up to date.

The stage of a cluster is the length of the longest path to it from a root. Two adjacent clusters whose stages differ by one have no path
between them but their edge, as a third cluster on such a path would have a stage in between: merging them makes no cycle (Theorem 1).
That holds for one merge. After it stages change, by one at most, so they are computed anew: first raised, as what follows the upstream
cluster now follows all that the downstream one needs, then lowered to the longest path again.

A partition is disjoint sets of nodes that make up a graph, without cycles between them, in an order in which they can run. A cluster
weighs what its operators do: how hard they are to tune is linear in the extents of their loops (AGO, equation 1).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowtide.base.kernels import kernel
from lowtide.ir.edges import predecessors
from lowtide.ir.graph import Graph, Kind, Node
from lowtide.ir.operators.nodes import is_view, row_of
from lowtide.ir.operators.row import Fusion
from research.fusion.loops import extents_of


@dataclass(frozen=True, slots=True)
class LoopWeights:
    """`slope * extent + bias`, summed over the loops of an operator. A view is index arithmetic within the loops of its result.

    The paper gives neither number. These make the mean cluster of MobileViT weigh what its figure 14 says.
    """

    slope: float = 0.1
    bias: float = 1.0

    def of(self, node: Node) -> float:
        """The weight of an operator. Raises CheckError where a shape is symbolic."""
        return sum(self.slope * extent + self.bias for extent in extents_of(node))


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
    nodes = set[Node]()
    for node in graph.nodes:
        if node.inputs and not node.writes and not node.after and fixed.issuperset(node.inputs):
            nodes.add(node)
            fixed.update(value for value in node.results if value.storage not in written)
    return frozenset(nodes)


def edges_between(graph: Graph, sets: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Pairs (earlier, later) of sets of which the second needs the first, each once; nodes of no set make none."""
    set_of = {at: index for index, members in enumerate(sets) for at in members}
    edges: dict[tuple[int, int], None] = {}
    for late, earlier in enumerate(predecessors(graph)):
        for early in earlier:
            pair = set_of.get(early, -1), set_of.get(late, -1)
            if pair[0] != pair[1] and -1 not in pair:
                edges[pair] = None
    return list(edges)


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


_NONE = -1


@kernel
def merge(before: Any, after: Any, weights: Any, complex_counts: Any, groups: Any, joins: Any, most_weight: Any, most_complex: Any) -> Any:
    """The cluster of each node, as one of its nodes.

    `before[e]` must come before `after[e]`, and is the smaller number; a node of a negative group is merged with nothing, others only
    within theirs. The heaviest candidate takes its lightest neighbour whose stage differs by one while their sum stays below
    `most_weight`, then the next heaviest does. What has been merged is the heaviest of all again, so that one pass over the nodes by
    falling weight is Algorithm 1. Where some nodes `join`, only what has complex operators takes, and only such nodes, downstream.
    """
    count, only_epilogues = len(weights), joins.any()
    cluster, weight, inside = np.arange(count), weights.copy(), complex_counts.copy()
    following, leading = _lists(before, count), _lists(after, count)
    stage, waiting = np.zeros(count, np.int64), (np.empty(count, np.int64), np.zeros(count, np.bool_))  # a queue, and what is in it
    for node in range(count):  # what comes before has a smaller number
        stage[node] = _longest(node, cluster, before, leading, stage)
    for node in np.argsort(-weights, kind="mergesort"):
        if cluster[node] != node or groups[node] < 0 or (only_epilogues and inside[node] == 0):
            continue
        while True:
            best = _NONE
            for downstream in (True, False):
                if only_epilogues and not downstream:
                    continue
                ends, lists = (after, following) if downstream else (before, leading)
                edge = _pruned(node, cluster, ends, lists)
                while edge != _NONE:
                    other = _find(cluster, ends[edge])
                    near = abs(stage[other] - stage[node]) == 1 and groups[other] == groups[node]
                    fits = near and weight[other] + weight[node] < most_weight and inside[other] + inside[node] <= most_complex
                    if fits and (joins[other] or not only_epilogues) and (best == _NONE or _lighter(other, best, weight)):
                        best = other
                    edge = lists[2][edge]
            if best == _NONE:
                break
            cluster[best] = node
            weight[node] += weight[best]
            inside[node] += inside[best]
            _join(node, best, following)
            _join(node, best, leading)
            _restage(node, cluster, before, after, following, leading, stage, waiting)
    for node in range(count):
        cluster[node] = _find(cluster, node)
    return cluster


@kernel(inner=True)
def _lighter(one: Any, other: Any, weight: Any) -> Any:
    """Whether a neighbour goes before another: by weight, then by position."""
    return weight[one] < weight[other] or (weight[one] == weight[other] and one < other)


@kernel(inner=True)
def _lists(ends: Any, count: Any) -> Any:
    """By node, the edges that have it at this end, as lists: first, last, next."""
    first, last, following = np.full(count, _NONE), np.full(count, _NONE), np.full(len(ends), _NONE)
    for edge in range(len(ends)):
        node = ends[edge]
        if first[node] == _NONE:
            first[node] = edge
        else:
            following[last[node]] = edge
        last[node] = edge
    return first, last, following


@kernel(inner=True)
def _find(cluster: Any, node: Any) -> Any:
    """The cluster of a node; paths are halved on the way."""
    while cluster[node] != node:
        cluster[node] = cluster[cluster[node]]
        node = cluster[node]
    return node


@kernel(inner=True)
def _join(node: Any, other: Any, lists: Any) -> None:
    first, last, following = lists
    if first[other] == _NONE:
        return
    if first[node] == _NONE:
        first[node] = first[other]
    else:
        following[last[node]] = first[other]
    last[node] = last[other]


@kernel(inner=True)
def _pruned(node: Any, cluster: Any, ends: Any, lists: Any) -> Any:
    """The first edge of a node's list, once those that lie within its cluster have been taken out: each is passed once."""
    first, last, following = lists
    edge, kept = first[node], _NONE
    while edge != _NONE:
        if _find(cluster, ends[edge]) == node:
            if kept == _NONE:
                first[node] = following[edge]
            else:
                following[kept] = following[edge]
        else:
            kept = edge
        edge = following[edge]
    last[node] = kept
    return first[node]


@kernel(inner=True)
def _restage(node: Any, cluster: Any, before: Any, after: Any, following: Any, leading: Any, stage: Any, waiting: Any) -> None:
    stage[node] = _longest(node, cluster, before, leading, stage)
    for lower in (False, True):
        _move(node, lower, cluster, before, after, following, leading, stage, waiting)


@kernel(inner=True)
def _longest(node: Any, cluster: Any, before: Any, leading: Any, stage: Any) -> Any:
    """One more than the greatest stage before a cluster."""
    longest, edge = 0, _pruned(node, cluster, before, leading)
    while edge != _NONE:
        longest = max(longest, stage[_find(cluster, before[edge])] + 1)
        edge = leading[2][edge]
    return longest


@kernel(inner=True)
def _move(root: Any, lower: Any, cluster: Any, before: Any, after: Any, following: Any, leading: Any, stage: Any, waiting: Any) -> None:
    """Raise what comes after a cluster until each stage is beyond those before it; or lower it to the longest path. Only what changes."""
    (queue, queued), head, length = waiting, 0, 1
    queue[0] = root
    while length:
        node = queue[head]
        head, length = (head + 1) % len(queue), length - 1
        queued[node] = False
        edge = _pruned(node, cluster, after, following)
        while edge != _NONE:
            other = _find(cluster, after[edge])
            new = _longest(other, cluster, before, leading, stage) if lower else max(stage[other], stage[node] + 1)
            if new != stage[other]:
                stage[other] = new
                if not queued[other]:
                    queue[(head + length) % len(queue)], queued[other], length = other, True, length + 1
            edge = following[2][edge]


PAPERS_WEIGHT = 600.0  # of a cluster: with the weights as they are, clusters of MobileViT weigh 440 on average, as the paper's do
MOST_WEIGHT = 2400.0  # here parts are tuned, not clusters, and what is joined is found in linear time: no block need be cut
_ANY = 2**31
_NORMS = ("aten.native_batch_norm", "aten._native_batch_norm_legit_no_training")  # in inference they map each element
_Sets = list[list[int]]  # positions of nodes, in an order in which they can run


def _generated(node: Node) -> bool:
    """Whether kernels are generated for an operator at all; what is none stays alone."""
    return row_of(node.op).fusion is not Fusion.NONE and not node.writes and node.body is None


@dataclass(frozen=True)
class _Run:
    """One run of Algorithm 1 on sets of nodes."""

    graph: Graph
    weights: LoopWeights
    joinable: Callable[[Node], bool]

    def merged(
        self, sets: _Sets, most_weight: float, most_complex: int = _ANY, groups: Sequence[int] = (), epilogues: bool = False
    ) -> _Sets:
        """Larger sets, in order; sets of different `groups` are not merged."""
        if not sets:
            return []
        nodes = [[self.graph.nodes[at] for at in members] for members in sets]
        pairs = np.array(edges_between(self.graph, sets), dtype=np.int64).reshape(-1, 2)
        group = groups or [0] * len(sets)
        taking = [group[at] if all(map(self.joinable, members)) else -1 for at, members in enumerate(nodes)]
        merging = merge(
            np.ascontiguousarray(pairs[:, 0]),
            np.ascontiguousarray(pairs[:, 1]),
            np.array([sum(map(self.weights.of, members)) for members in nodes], dtype=np.float64),
            np.array([sum(map(is_complex, members)) for members in nodes], dtype=np.int64),
            np.array(taking, dtype=np.int64),
            np.array([epilogues and all(map(is_epilogue, members)) for members in nodes], dtype=np.bool_),
            float(most_weight),
            int(most_complex),
        )
        by_cluster: dict[int, list[int]] = {}
        for members, cluster in zip(sets, merging.tolist(), strict=True):
            by_cluster.setdefault(cluster, []).extend(members)
        return ordered(self.graph, list(by_cluster.values()))

    def units(self, sets: _Sets, most_weight: float, groups: Callable[[_Sets], Sequence[int]] = lambda sets: ()) -> _Sets:
        """Complex operators with what comes after them, then with what else is beside them: at most one in each set."""
        done = self.merged(sets, most_weight, 1, groups(sets), epilogues=True)
        return self.merged(done, most_weight, 1, groups(done))


def partition(
    graph: Graph, most_weight: float = MOST_WEIGHT, weights: LoopWeights | None = None, *, joinable: Callable[[Node], bool] = _generated
) -> Partition:
    """Cluster a graph by Algorithm 1 over its units; a node that is not `joinable` stays alone. Same graph, same clusters.

    Raises CheckError where a size is symbolic or the graph is no graph.
    """
    weights = weights or LoopWeights()
    run = _Run(graph, weights, joinable)
    return from_sets(graph, run.merged(run.units(_alone(graph), most_weight), most_weight), weights)


def partition_of_operators(
    graph: Graph, most_weight: float = PAPERS_WEIGHT, weights: LoopWeights | None = None, *, joinable: Callable[[Node], bool] = _generated
) -> Partition:
    """The same over operators, as the paper has it."""
    weights = weights or LoopWeights()
    return from_sets(graph, _Run(graph, weights, joinable).merged(_alone(graph), most_weight), weights)


def split(parts: Partition, *, joinable: Callable[[Node], bool] = _generated) -> Partition:
    """Each cluster by itself into parts of at most one complex operator (AGO, section V: Split)."""
    cluster_of = {node: at for at, nodes in enumerate(parts.clusters) for node in nodes}

    def groups(sets: _Sets) -> list[int]:
        return [cluster_of[parts.graph.nodes[members[0]]] for members in sets]

    alone = [sets for sets in _alone(parts.graph) if parts.graph.nodes[sets[0]] in cluster_of]
    units = _Run(parts.graph, parts.weights, joinable).units(alone, float("inf"), groups)
    return from_sets(parts.graph, units, parts.weights)


def is_complex(node: Node) -> bool:
    """Whether an operator adds up products: convolutions, products of matrices, attention."""
    return row_of(node.op).fusion is Fusion.COMPLEX


def is_epilogue(node: Node) -> bool:
    """Whether an operator can be applied to each element as another makes it."""
    return row_of(node.op).fusion is Fusion.ELEMENTWISE or is_view(node) or node.op.startswith(_NORMS)


def _alone(graph: Graph) -> _Sets:
    """Each node by itself, constants aside."""
    constants = constant_nodes(graph)
    return [[at] for at, node in enumerate(graph.nodes) if node not in constants]
