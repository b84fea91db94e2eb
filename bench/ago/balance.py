"""How balanced a partition is: what AGO's figure 14 tells of one."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log10

from lowtide.ir.graph import Graph, Node
from research.fusion.clusters import LoopWeights, Partition, constant_nodes, from_sets, ordered

_TRIVIAL = 20.0  # weighs less: nothing to tune in it
_BINS = 10


@dataclass(frozen=True)
class Balance:
    """Of the weights of a partition's clusters."""

    count: int
    mean: float
    median: float
    jain: float  # (sum w)^2 / (n sum w^2): 1 where all weigh the same, 1/n where one weighs all
    trivial: int  # clusters that weigh less than 20

    @classmethod
    def of(cls, weights: Sequence[float]) -> Balance:
        """Raises ValueError for no clusters."""
        if not weights:
            raise ValueError("expected one cluster or more, got none")
        square = sum(weight * weight for weight in weights)
        jain = sum(weights) ** 2 / (len(weights) * square) if square else 1.0
        trivial = sum(weight < _TRIVIAL for weight in weights)
        return cls(len(weights), statistics.fmean(weights), statistics.median(weights), jain, trivial)


def histogram(weights: Sequence[float], bins: int = _BINS, most: float = 10_000.0) -> tuple[tuple[float, float, int], ...]:
    """(from, to, clusters) in bins that are equally wide by logarithm from 1 to `most`; what lies beyond is in the first and the last."""
    found = [0] * bins
    for weight in weights:
        place = int(bins * log10(max(weight, 1.0)) / log10(most))
        found[min(bins - 1, place)] += 1
    edges = [most ** (place / bins) for place in range(bins + 1)]
    return tuple((edges[place], edges[place + 1], count) for place, count in enumerate(found))


def cluster_weights(parts: Partition) -> tuple[float, ...]:
    """What each cluster weighs."""
    return tuple(sum(map(parts.weights.of, nodes)) for nodes in parts.clusters)


def of_clusters(graph: Graph, clusters: Iterable[Sequence[Node]], weights: LoopWeights | None = None) -> Partition:
    """The partition that some clusters make; a node of none, if it is no constant, stays alone.

    Raises ValueError where clusters overlap, or need one another's results.
    """
    number = {node: at for at, node in enumerate(graph.nodes)}
    taken: set[Node] = set()
    sets: list[list[int]] = []
    for nodes in clusters:
        if taken & set(nodes) or len(set(nodes)) < len(nodes):
            raise ValueError("expected clusters that have no node in common")
        taken |= set(nodes)
        sets.append([number[node] for node in nodes])
    constants = constant_nodes(graph)
    sets += [[at] for node, at in number.items() if node not in taken and node not in constants]
    return from_sets(graph, ordered(graph, sets), weights or LoopWeights())
