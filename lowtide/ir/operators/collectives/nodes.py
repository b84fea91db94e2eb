"""Which part a node has in what the processes of a group do together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.collectives.rows import GATHER
from lowtide.ir.operators.row import Collective
from lowtide.ir.operators.table import row_of


def is_collective(node: Node) -> bool:
    """Whether a node begins or ends what the processes of a group do together: once, and in one order on all of them."""
    return row_of(node.op).collective is not Collective.NONE


def begins_collective(node: Node) -> bool:
    """Whether a node begins it: what it makes is whole, and may be read, only behind the node that ends it."""
    return row_of(node.op).collective is Collective.BEGINS


def serving_collectives(nodes: Sequence[Node]) -> Iterator[int]:
    """By index: collectives, what is done to a gradient for one (scaled, put together, filled up), and parts cut out of what came of it.

    Each lets go at least as much as it makes, as soon as it has run: early, as an update is that makes nothing. Not so those that gather
    what the caller holds in parts, which is a load.
    """
    makers: dict[Value, int] = {value: index for index, node in enumerate(nodes) for value in node.results}
    loads = _loads(nodes, makers)
    stack = [index for index, node in enumerate(nodes) if (is_collective(node) or node.op == _OWN_PART) and index not in loads]
    seen = set(stack)
    while stack:
        before = {makers[value] for value in nodes[stack.pop()].inputs if value in makers}
        found = {index for index in before - seen if nodes[index].op in _PREPARING or row_of(nodes[index].op).view}
        seen |= found
        stack.extend(found)
    yield from sorted(seen)


def _loads(nodes: Sequence[Node], makers: Mapping[Value, int]) -> set[int]:
    """By index: the collectives that gather what the caller holds, as it lies or put together, and those that end them."""
    found: set[int] = set()
    for index, node in enumerate(nodes):
        if not is_collective(node):
            continue
        sent = makers.get(node.inputs[0])
        of_parts = sent is None or (nodes[sent].op == _CAT and not any(value in makers for value in nodes[sent].inputs))
        if sent in found or (node.op == GATHER and of_parts):
            found.add(index)
    return found


_CAT = "aten.cat.default"
_OWN_PART = "lowtide.own_part.default"
_PREPARING = frozenset({"aten.mul.Scalar", "aten.mul.Tensor", _CAT, "aten.constant_pad_nd.default"})
