"""Recomputation subgraphs by symbolic memory impact: BladeDISC++'s search at compile time (Yuan et al., 2024, section 2.3).

From the node that makes a tensor the subgraph grows backwards, by the maker of its largest argument first. Were the tensor evicted and made
again by the subgraph, its bytes would be free meanwhile, and what the subgraph reads would have to stay: the impact is the first less
the second, without what the caller holds throughout. A subgraph is worth it where its impact is positive over the range; of these
the one of greatest impact is preferred, of equal ones the smallest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from lowtide.cost.memory import counted_storages
from lowtide.ir.graph import Graph, Node, Storage, Value
from lowtide.ir.operators.nodes import repeatable
from lowtide.ir.shapes.compare import sign_of
from lowtide.ir.shapes.dimension import Dimensions
from lowtide.ir.shapes.polynomial import Polynomial, number, total
from lowtide.ir.shapes.sign import Sign
from lowtide.ir.sizes import Size

_Makers: TypeAlias = "dict[Storage, Node]"


@dataclass(frozen=True)
class Recomputation:
    """Nodes that make a tensor again, and what that leaves free meanwhile."""

    nodes: tuple[Node, ...]  # the last to run first
    impact_bytes: Size  # what the tensor takes, less what the nodes read that would else be gone


def recomputations(graph: Graph, value: Value) -> Iterator[Recomputation]:
    """Larger and larger subgraphs that make `value` again, until all that they read is the caller's or cannot be repeated."""
    counted = set(counted_storages(graph))
    makers = {made.storage: node for node in reversed(graph.nodes) for made in node.outputs if made is not None}
    nodes: list[Node] = []
    next_ = makers.get(value.storage)
    while next_ is not None and repeatable(next_) is not None:
        nodes.append(next_)
        read = _read(nodes, counted)
        impact = Polynomial.of(value.storage.nbytes) - total(Polynomial.of(storage.nbytes) for storage in read)
        yield Recomputation(tuple(nodes), impact.size)
        next_ = _largest(read, makers, graph.dimensions)


def preferred(graph: Graph, value: Value) -> Recomputation | None:
    """The subgraph of greatest impact among those that save memory at every point; None where none does."""
    best: Recomputation | None = None
    for found in recomputations(graph, value):
        impact = Polynomial.of(found.impact_bytes)
        if sign_of(impact - number(1), graph.dimensions) not in (Sign.NOT_NEGATIVE, Sign.ZERO):
            continue
        if best is None or sign_of(Polynomial.of(best.impact_bytes) - impact, graph.dimensions) is Sign.NOT_POSITIVE:
            best = found
    return best


def _read(nodes: list[Node], counted: set[Storage]) -> list[Storage]:
    """What nodes read that they do not make and that the caller does not hold."""
    made = {value.storage for node in nodes for value in node.outputs if value is not None}
    return list(
        dict.fromkeys(each.storage for node in nodes for each in node.inputs if each.storage in counted and each.storage not in made)
    )


def _largest(read: list[Storage], makers: _Makers, dimensions: Dimensions) -> Node | None:
    """The maker of the largest of what is read, as far as that can be compared, of others the first."""
    made = [storage for storage in read if storage in makers]
    if not made:
        return None
    best = made[0]
    for storage in made[1:]:
        if sign_of(Polynomial.of(storage.nbytes) - Polynomial.of(best.nbytes), dimensions) is Sign.NOT_NEGATIVE:
            best = storage
    return makers[best]
