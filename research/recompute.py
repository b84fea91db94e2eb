"""Recomputation subgraphs by symbolic memory impact: BladeDISC++'s search at compile time (Yuan et al., 2024, section 2.3).

From the node that makes a tensor the subgraph grows backwards, by the maker of its largest argument first. Were the tensor evicted and made
again by the subgraph, its bytes would be free meanwhile, and what the subgraph reads would have to stay: the impact is the first less
the second, without what the caller holds throughout and without what lives on anyway. A subgraph is worth it where its impact is positive
over the range; of these the one of greatest impact is preferred, of equal ones the smallest.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import islice

from lowtide.cost.memory import counted_storages
from lowtide.ir.graph import Graph, Node, Storage, Value
from lowtide.ir.operators.nodes import repeatable
from lowtide.ir.shapes.polynomial import Polynomial, number, total
from lowtide.ir.sizes import Size
from research.shapes.compare import sign_of
from research.shapes.sign import Sign


@dataclass(frozen=True)
class Recomputation:
    """Nodes that make a tensor again, and what that leaves free meanwhile."""

    nodes: tuple[Node, ...]  # the last to run first
    reads: tuple[Storage, ...]  # what they read that they do not make and that the caller does not hold
    impact: Polynomial  # bytes: what the tensor takes, less what the nodes read that would else be gone

    @property
    def impact_bytes(self) -> Size:
        """The impact as the graph's own noun."""
        return self.impact.size


class Search:
    """Finds the subgraphs of one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._bytes = {storage: Polynomial.of(storage.nbytes) for storage in counted_storages(graph)}
        given = {value.storage for value in graph.inputs}
        pairs = ((value.storage, node) for node in reversed(graph.nodes) for value in node.outputs if value is not None)
        self._makers = {storage: node for storage, node in pairs if storage not in given}

    def subgraphs(self, storage: Storage, living: Container[Storage] = frozenset()) -> Iterator[Recomputation]:
        """Larger and larger subgraphs that make a storage again, until all that they read lives, is the caller's, or cannot be repeated."""
        nodes: list[Node] = []
        storages: set[Storage] = set()
        read: dict[Storage, None] = {}  # in the order in which it is found
        next_ = self._makers.get(storage)
        while next_ is not None and repeatable(next_) is not None:
            nodes.append(next_)
            storages |= {value.storage for value in next_.outputs if value is not None}
            read |= dict.fromkeys(value.storage for value in next_.inputs if value.storage in self._bytes)
            reads = tuple(each for each in read if each not in storages)
            extended = [each for each in reads if each not in living]
            yield Recomputation(tuple(nodes), reads, Polynomial.of(storage.nbytes) - total(self._bytes[each] for each in extended))
            next_ = self._largest(extended)

    def worthwhile(self, storage: Storage, living: Container[Storage] = frozenset(), most_nodes: int | None = None) -> list[Recomputation]:
        """Those of at most so many nodes whose impact is positive at every point."""
        return [each for each in islice(self.subgraphs(storage, living), most_nodes) if self._is_worthwhile(each)]

    def _is_worthwhile(self, recomputation: Recomputation) -> bool:
        return sign_of(recomputation.impact - number(1), self._graph.dimensions) in (Sign.NOT_NEGATIVE, Sign.ZERO)

    def _largest(self, read: list[Storage]) -> Node | None:
        """The maker of the largest of what is read, as far as that can be compared, of others the first."""
        candidates = [storage for storage in read if storage in self._makers]
        if not candidates:
            return None
        best = candidates[0]
        for storage in candidates[1:]:
            if sign_of(self._bytes[storage] - self._bytes[best], self._graph.dimensions) is Sign.NOT_NEGATIVE:
                best = storage
        return self._makers[best]


def recomputations(graph: Graph, value: Value) -> Iterator[Recomputation]:
    """Larger and larger subgraphs that make `value` again, as if nothing else lived on."""
    return Search(graph).subgraphs(value.storage)


def preferred(graph: Graph, value: Value) -> Recomputation | None:
    """The subgraph of greatest impact among those that save memory at every point; None where none does."""
    best: Recomputation | None = None
    for subgraph in Search(graph).worthwhile(value.storage):
        if best is None or sign_of(best.impact - subgraph.impact, graph.dimensions) is Sign.NOT_POSITIVE:
            best = subgraph
    return best
