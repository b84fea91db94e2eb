"""What is made like another tensor, made of its sizes instead.

`empty_like(x)` asks `x` for its looks alone, and yet comes after it and holds it. Of numbers it can be made at any time: random numbers are
then drawn, and gradients begun, without waiting for what they are shaped like. The bits are the same.
"""

from __future__ import annotations

from dataclasses import replace

from lowtide.ir.graph import Arg, Atom, Graph, Node
from lowtide.ir.operators.table import forms_of
from lowtide.ir.sizes import contiguous_stride
from lowtide.rewrite.base import Rewritten, replace_nodes

_EMPTY_LIKE, _EMPTY_STRIDED = "aten.empty_like.default", "aten.empty_strided.default"


def make_anew(graph: Graph) -> Rewritten:
    """Every such tensor whose sizes are numbers."""
    return replace_nodes(graph, {node: (made,) for node in graph.nodes if (made := _made(node)) is not None})


def _made(node: Node) -> Node | None:
    """The node that makes the same of numbers; None where there is none."""
    op = forms_of(node.op).of_sizes
    value = node.outputs[0] if op else None
    if value is None or not all(isinstance(size, int) for size in (*value.shape, *value.stride)):
        return None
    looks = (("dtype", Atom("dtype", value.dtype)), ("device", Atom("device", value.storage.device)))
    args: tuple[Arg, ...] = (value.shape,)
    if value.stride == contiguous_stride(value.shape):
        return replace(node, op=op, args=args, kwargs=looks)
    if node.op == _EMPTY_LIKE:
        return replace(node, op=_EMPTY_STRIDED, args=(*args, value.stride), kwargs=looks)
    return None
