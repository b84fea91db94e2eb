"""Why a node has no axis, for people."""

from __future__ import annotations

from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.nodes import is_arithmetic, is_random, is_transfer, row_of

# Operators without a rule, and why.
_REASONS = {
    "arange": "its numbers go on from part to part",
    "as_strided": "it says where all of a storage's elements lie",
    "as_strided_scatter": "it says where all of a storage's elements lie",
    "linspace": "its numbers go on from part to part",
    "eye": "its ones stand where rows meet columns",
    "nonzero": "what it makes has a size that follows from the data",
    "squeeze": "a part of one would lose the dimension",
    "mkldnn_rnn_layer": "each step needs the one before, and weights are packed",
    "mkldnn_rnn_layer_backward": "each step needs the one before, and weights are packed",
    "_ctc_loss": "each step needs the one before",
    "_ctc_loss_backward": "each step needs the one before",
}


def reason(node: Node) -> str:
    """Why `axes_of` has nothing for a node."""
    if is_arithmetic(node) or node.op == "aten._local_scalar_dense.default":
        return "it is about Python numbers"
    if is_random(node):
        return "it draws random numbers"
    if is_transfer(node):
        return "it copies to the host or back"
    if all(max((extent for extent in value.shape if isinstance(extent, int)), default=1) <= 1 for value in _touched(node)):
        return "it is about single elements"
    if row_of(node.op).axes is not None:
        return "all its dimensions are closed, or of 1"
    return _REASONS.get(node.op.split(".")[1], "it has no rule")


def _touched(node: Node) -> tuple[Value, ...]:
    return (*node.inputs, *node.results)
