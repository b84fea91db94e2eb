"""Dropout's masks as bits.

On a CPU dropout draws ones and zeros, divides them by the share that is kept, and multiplies by what comes out, once in the forward pass
and once in the backward pass: a float for each element is held in between. One bit says as much. What it is multiplied by is found again by
the same division.
"""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.ir.graph import Node, Value
from lowtide.rewrite.algebra.rule import Match
from lowtide.rewrite.algebra.uses import Uses, bytes_of_bits, is_backward, is_dense, layout, taking

_DRAWN, _TIMES = "aten.bernoulli.p", "aten.mul.Tensor"
_DIVIDED = ("aten.div.Scalar", "aten.div.Tensor")
_FLOATS = ("float16", "bfloat16", "float32", "float64")


def dropout_as_bits(uses: Uses) -> Iterator[Match]:
    """mul(x, div(bernoulli(p), keep)) -> masked_mul(x, pack_bits(bernoulli(p)), keep), in both passes."""
    for drawn in uses.nodes_of(_DRAWN):
        divided = _only_reader(uses, drawn.outputs[0])
        if divided is not None and divided.op in _DIVIDED and isinstance(divided.args[1], float):
            yield from _place(uses, drawn, divided)


def _place(uses: Uses, drawn: Node, divided: Node) -> Iterator[Match]:
    flags, mask = drawn.outputs[0], divided.outputs[0]
    assert flags is not None
    if mask is None or not uses.is_forward(mask) or not is_dense(mask) or mask.dtype not in _FLOATS or layout(mask) != layout(flags):
        return
    readers, keep = uses.readers[mask.storage], divided.args[1]
    if not all(_multiplies(node, mask) for node in readers) or not any(map(is_backward, readers)):
        return
    bits = uses.fresh(flags, f"{mask.name}_bits", "uint8", (bytes_of_bits(mask),))
    packed = Node("lowtide.pack_bits.default", (flags,), (bits,), source=divided.source)
    instead: dict[Node, tuple[Node, ...]] = {divided: (packed,)}
    for node in readers:
        x = node.args[0] if node.args[1] is mask else node.args[1]
        assert isinstance(x, Value)
        instead[node] = (taking(node, "lowtide.masked_mul.default", (x, bits, keep), {x: "lowtide.masked_mul.out"}),)
    yield Match(instead, mask.storage, bits.storage)


def _only_reader(uses: Uses, value: Value | None) -> Node | None:
    readers = uses.readers[value.storage] if value is not None and uses.is_forward(value) else []
    return readers[0] if len(readers) == 1 and value in readers[0].inputs else None


def _multiplies(node: Node, mask: Value) -> bool:
    """Whether a node multiplies something else, of the same layout, by the mask, and nothing more."""
    if node.op != _TIMES or node.kwargs or node.writes or mask not in node.args:
        return False
    x, made = node.args[0] if node.args[1] is mask else node.args[1], node.outputs[0]
    if not isinstance(x, Value) or x.storage is mask.storage or made is None:
        return False
    return layout(x) == layout(mask) == layout(made)
