"""Which part a node has in what the processes of a group do together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.row import Collective
from lowtide.ir.operators.table import row_of


def is_collective(node: Node) -> bool:
    """Whether a node begins or ends what the processes of a group do together: once, and in one order on all of them."""
    return row_of(node.op).collective is not Collective.NONE


def begins_collective(node: Node) -> bool:
    """Whether a node begins it: what it makes is whole, and may be read, only behind the node that ends it."""
    return row_of(node.op).collective is Collective.BEGINS


def loads_parts(node: Node) -> bool:
    """Whether a node makes whole what the processes hold parts of, from begin to end: as good a second time."""
    return row_of(node.op).collective is Collective.LOADS


def serving_collectives(nodes: Sequence[Node]) -> Iterator[int]:
    """By index: collectives, what is done to a gradient for one (scaled, put together, filled up), and parts cut out of what came of it,
    or summed.

    Each lets go at least as much as it makes, as soon as it has run: early, as an update is that makes nothing. Not so loads.
    """
    makers: dict[Value, int] = {value: index for index, node in enumerate(nodes) for value in node.results}
    stack = [index for index, node in enumerate(nodes) if (is_collective(node) and not loads_parts(node)) or node.op in _PARTS]
    seen = set(stack)
    while stack:
        before = {makers[value] for value in nodes[stack.pop()].inputs if value in makers}
        found = {index for index in before - seen if nodes[index].op in _PREPARING or row_of(nodes[index].op).view}
        seen |= found
        stack.extend(found)
    yield from sorted(seen)


_PARTS = frozenset({"lowtide.own_part.default", "lowtide.sum_parts.default"})
_PREPARING = frozenset({"aten.mul.Scalar", "aten.mul.Tensor", "aten.cat.default", "aten.constant_pad_nd.default"})
