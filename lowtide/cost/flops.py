"""What an operator does: floating-point operations and bytes moved, from its shapes alone.

A multiplication and an addition are two operations. Operators whose row says nothing do as good as none: moving their bytes is what takes
their time. Each element that an operator has to touch is moved once: a lookup reads the rows that it looks up and not the table, an
argument that is asked for its shape alone is not read. Views move nothing.
"""

from __future__ import annotations

from lowtide.ir.graph import Node
from lowtide.ir.operators.nodes import is_view
from lowtide.ir.operators.shapes import bytes_of, read_bytes
from lowtide.ir.operators.table import row_of
from lowtide.ir.sizes import ITEM_BYTES


def node_flops(node: Node) -> int:
    """Floating-point operations of one run. Raises CheckError where a shape is symbolic."""
    count = row_of(node.op).flops
    return 0 if count is None else count(node)


def node_moved_bytes(node: Node) -> int:
    """Bytes read and written by one run, each element that is touched once. Raises CheckError where a shape is symbolic."""
    row = row_of(node.op)
    if is_view(node) or row.untouched:
        return 0
    return read_bytes(node, row.unread) + bytes_of(node.results) if row.moved_bytes is None else row.moved_bytes(node)


def compute_dtype(node: Node) -> str:
    """In what a node computes: the widest of what it reads and makes, by which the peak rate of a device is chosen."""
    kinds = [value.dtype for value in (*node.outputs, *node.inputs) if value is not None and "float" in value.dtype]
    return max(kinds, key=lambda dtype: ITEM_BYTES[dtype], default="float32")
