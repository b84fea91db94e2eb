"""Between what integers lie: as the operator that makes them says, and as one that reads them and refuses all others does."""

from __future__ import annotations

from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.shapes import Bounds, below, up_to
from lowtide.ir.operators.table import row_of
from lowtide.ir.sizes import product

HOLDS: dict[str, Bounds] = {
    "bool": (0, 1), "uint8": (0, 2**8 - 1), "int8": (-(2**7), 2**7 - 1), "int16": (-(2**15), 2**15 - 1), "int32": (-(2**31), 2**31 - 1),
}  # fmt: skip
CONVERTS = "aten._to_copy.default"


def made_within(node: Node, value: Value) -> Bounds | None:
    """The bounds of an integer result by the operator that makes it; None where that says nothing."""
    given, row = node.args[0] if node.args else None, row_of(node.op)
    if not isinstance(given, Value):
        return None
    if node.op == CONVERTS:
        return HOLDS.get(given.dtype)
    if row.planes:
        return up_to(product(given.shape[-row.planes :]))
    if row.indices is None or node.outputs[row.indices.result] is not value:
        return None
    position, default = row.indices.dimension, row.indices.default
    dimension = dict(node.kwargs).get("dim", node.args[position] if position < len(node.args) else default)
    return below(given, dimension) if isinstance(dimension, int) else up_to(product(given.shape))


def refused_beyond(node: Node, value: Value) -> Bounds | None:
    """The bounds outside of which a node that reads integers raises; None where it takes all."""
    rule = row_of(node.op).refuses
    return None if rule is None else rule(node, value)
