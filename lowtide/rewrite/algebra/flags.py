"""What a backward operator asks with yes or no, as bits: a rectifier's result, and masks."""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.ir.graph import Node, Value
from lowtide.rewrite.algebra.packed import held_as, readers_of_packed
from lowtide.rewrite.algebra.rule import Match
from lowtide.rewrite.algebra.uses import Uses, bytes_of_bits, is_dense, layout, taking

_THRESHOLD = "aten.threshold_backward.default"


def rectified_as_bits(uses: Uses) -> Iterator[Match]:
    """threshold_backward(g, y, 0) -> masked(g, pack_positive(y)), where the backward pass reads y for nothing else."""
    for node in uses.nodes_of(_THRESHOLD):
        gradient, y, made = node.args[0], node.args[1], node.outputs[0]
        if node.args[2] != 0 or not isinstance(y, Value) or not isinstance(gradient, Value) or made is None:
            continue
        if uses.read_by_backward(y.storage) != [node] or not uses.is_forward(y) or not is_dense(y):
            continue
        if layout(gradient) != layout(y) or layout(made) != layout(y):
            continue
        bits = _bits(uses, y)
        packed = Node("lowtide.pack_positive.default", (y,), (bits,), source=uses.makers[y].source)
        late = taking(node, "lowtide.masked.default", (gradient, bits), {gradient: "lowtide.masked.out"})
        yield Match({uses.makers[y]: (uses.makers[y], packed), node: (late,)}, y.storage, bits.storage)


def masks_as_bits(uses: Uses) -> Iterator[Match]:
    """f(g, mask) in the backward pass -> f(g, unpack_bits(pack_bits(mask)))."""
    for mask in [value for value in uses.makers if value.dtype == "bool"]:
        if readers := readers_of_packed(uses, mask):
            yield _place(uses, mask, readers)


def _place(uses: Uses, mask: Value, readers: list[Node]) -> Match:
    maker, bits = uses.makers[mask], _bits(uses, mask)

    def unpacked(again: Value) -> Node:
        return Node("lowtide.unpack_bits.default", (bits, mask.shape, mask.stride), (again,))

    packed = Node("lowtide.pack_bits.default", (mask,), (bits,), source=maker.source)
    return held_as(uses, mask, packed, unpacked, readers)


def _bits(uses: Uses, value: Value) -> Value:
    return uses.fresh(value, f"{value.name}_bits", "uint8", (bytes_of_bits(value),))
