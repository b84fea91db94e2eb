"""Clusters of any structure: AGO, section IV, Algorithm 1.

    parts = partition(graph)
    for cluster in parts.clusters: ...    # nodes in program order, clusters in an order in which they can run

The paper merges operators, and may so cut between an operator and its activation. `partition` merges *units*: a complex operator with the
simple ones around it, what conventional fusion makes one kernel. So no cut makes a kernel that conventional fusion would not have had.
`partition_of_operators` is the paper's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.cpu.partition.merge import merge
from lowtide.cpu.partition.partition import LoopWeights, Partition, constant_nodes, edges_between, from_sets, ordered
from lowtide.ir.graph import Graph, Node
from lowtide.ir.operators.nodes import is_view
from lowtide.ir.operators.row import Fusion
from lowtide.ir.operators.table import row_of

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
        found = merge(
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
        for members, cluster in zip(sets, found.tolist(), strict=True):
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
