"""Bytes read and written by operators that do not touch all of their arguments: each element that is touched once."""

from __future__ import annotations

from math import prod

from lowtide.base.narrow import of_kind
from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.row import Count
from lowtide.ir.operators.shapes import bytes_of, ints, read_bytes
from lowtide.ir.sizes import ITEM_BYTES


def lookup(node: Node) -> int:
    """Of the table as many elements are read as the result has."""
    return read_bytes(node, (0,)) + 2 * bytes_of(node.results)


def likelihood(node: Node) -> int:
    """Of the scores one for each target is read."""
    scores, targets = node.args[0], node.args[1]
    scores = of_kind(Value, scores)
    return read_bytes(node, (0,)) + prod(ints(node, targets)) * ITEM_BYTES[scores.dtype] + bytes_of(node.results)


def into_positions(index: int, source: int, *, adds: bool = False) -> Count:
    """Elements of what the caller owns are written over, or added to, where an index says; the rest of it is not touched."""
    return lambda node: _into_positions(node, index, source, adds)


def with_flags(passes: int, *, numbers: bool = False) -> Count:
    """What is read and written, and a byte for each element as often as flags go through memory; `numbers`: and factors made of them."""
    return lambda node: read_bytes(node, ()) + bytes_of(node.results) * (3 if numbers else 1) + passes * _elements(node)


def with_indices(position: int, passes: int) -> Count:
    """What is read and written, and as often eight bytes for each element of an argument."""
    return lambda node: read_bytes(node, ()) + bytes_of(node.results) + 8 * passes * prod(ints(node, node.args[position]))


def _elements(node: Node) -> int:
    """Of the largest tensor that a node reads or makes."""
    return max(prod(ints(node, value)) for value in (*node.inputs, *node.results))


def index_put(node: Node) -> int:
    """As `into_positions`; whether it adds is an argument."""
    return _into_positions(node, 1, 2, len(node.args) > 3 and bool(node.args[3]))


def convolution_gradients(node: Node) -> int:
    """The weight is read for the gradient of the input, the input for that of the weight."""
    unread = [position for position, output in ((2, node.outputs[0]), (1, node.outputs[1])) if output is None]
    return read_bytes(node, unread) + bytes_of(node.results)


def _into_positions(node: Node, index: int, source: int, adds: bool) -> int:
    given = node.args[source]
    written = given if isinstance(given, Value) else node.args[index]  # a number goes wherever the index points
    written_bytes = prod(ints(node, written)) * ITEM_BYTES[node.writes[0][0].dtype]
    return read_bytes(node, (0,)) + (1 + adds) * written_bytes
