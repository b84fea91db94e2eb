"""Rows of lowtide's own operators, as they are composed of torch's where no kernel of their own does it."""

from __future__ import annotations

from lowtide.ir.operators.row import Operator
from lowtide.ir.operators.shapes import bytes_of, read_bytes
from lowtide.ir.operators.traffic import with_flags, with_indices

ROWS = (
    Operator(name="lowtide.pack_bits", launches=5, moved_bytes=with_flags(6)),
    Operator(name="lowtide.pack_positive", launches=6, moved_bytes=with_flags(7)),
    Operator(name="lowtide.unpack_bits", launches=3, moved_bytes=with_flags(4)),
    Operator(name="lowtide.masked", launches=3, moved_bytes=with_flags(4)),
    Operator(name="lowtide.masked_mul", launches=4, moved_bytes=with_flags(4, numbers=True)),
    Operator(name="lowtide.add_rows", moved_bytes=lambda node: read_bytes(node, ()) + bytes_of(node.results)),
    Operator(name="lowtide.own_part", moved_bytes=lambda node: 2 * bytes_of(node.results)),
    Operator(name="lowtide.pool_places", launches=2, moved_bytes=with_indices(0, 2)),
    Operator(name="lowtide.max_pool2d_backward", launches=3, moved_bytes=with_indices(1, 3)),
    Operator(name="lowtide.cross_entropy_backward", launches=2, moved_bytes=lambda node: read_bytes(node, ()) + 3 * bytes_of(node.results)),
    Operator(name="lowtide.layer_norm_backward", launches=2, moved_bytes=lambda node: read_bytes(node, ()) + 3 * bytes_of(node.results)),
)
