"""The loops around an operator, which AGO weighs it by: their extents, from shapes alone."""

from __future__ import annotations

from math import prod

from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.nodes import functional_base
from lowtide.ir.operators.row import ints, made_shape, shape_of

_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math", "scaled_dot_product_attention",
)  # fmt: skip
# By letters; an argument in brackets is added, and has no loop of its own.
_PRODUCTS = {
    "mm": "mk,kn", "bmm": "bmk,bkn", "addmm": "[mn],mk,kn", "baddbmm": "[bmn],bmk,bkn", "mv": "mk,k", "addmv": "[m],mk,k", "dot": "k,k",
    "vdot": "k,k", "addr": "[mn],m,n",
}  # fmt: skip


def extents_of(node: Node) -> tuple[int, ...]:
    """The extents of an operator's loops. Raises CheckError where a shape is symbolic."""
    name = functional_base(node.op).removeprefix("aten.")
    extents: tuple[int, ...] | None = None
    if name == "convolution":
        extents = _convolution(node)
    elif name in _ATTENTION:
        extents = _attention(node)
    elif name in _PRODUCTS:
        extents = _product(node, _PRODUCTS[name])
    return _largest(node) if extents is None else extents


def _convolution(node: Node) -> tuple[int, ...] | None:
    """x[n, in, ..], weight[out, in of a group, ..]."""
    x, weight, groups = node.args[0], node.args[1], node.args[8]
    if node.args[6] is not False or not isinstance(x, Value) or not isinstance(weight, Value) or not isinstance(groups, int):
        return None
    out, inner, *kernel = shape_of(node, 1)
    images, _, *places = made_shape(node)
    channels = (groups, out // groups) if groups > 1 else (out,)
    return (images, *channels, *places, inner, *kernel) if len(shape_of(node, 0)) == len(kernel) + 2 else None


def _attention(node: Node) -> tuple[int, ...] | None:
    """query[b, h, q, e], key[b, h, k, e], value[b, h, k, v]: two products, over e and over k."""
    if not all(isinstance(each, Value) and len(each.shape) == 4 for each in node.args[:3]):
        return None
    (b, h, q, e), k, v = shape_of(node, 0), shape_of(node, 1)[2], shape_of(node, 2)[3]
    return b, h, q, k, e, v


def _product(node: Node, text: str) -> tuple[int, ...] | None:
    extents: dict[str, int] = {}
    for arg, term in zip(node.args, text.split(","), strict=False):
        if not term.startswith("["):
            if not isinstance(arg, Value) or len(arg.shape) != len(term):
                return None
            extents |= dict(zip(term, ints(node, arg), strict=True))
    return tuple(extents.values())


def _largest(node: Node) -> tuple[int, ...]:
    """A loop for each dimension of the largest result or argument."""
    values = [value for value in node.outputs if value is not None] or list(node.inputs)
    shapes = [ints(node, value) for value in (*values, *node.inputs) if value.storage.kind.value not in ("parameter", "buffer")]
    return max(shapes, key=prod, default=())
