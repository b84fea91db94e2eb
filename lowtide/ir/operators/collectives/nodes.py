"""Which part a node has in what the processes of a group do together."""

from __future__ import annotations

from lowtide.ir.graph import Node
from lowtide.ir.operators.row import Collective
from lowtide.ir.operators.table import row_of


def is_collective(node: Node) -> bool:
    """Whether a node begins or ends what the processes of a group do together: once, and in one order on all of them."""
    return row_of(node.op).collective is not Collective.NONE


def begins_collective(node: Node) -> bool:
    """Whether a node begins it: what it makes is whole, and may be read, only behind the node that ends it."""
    return row_of(node.op).collective is Collective.BEGINS
