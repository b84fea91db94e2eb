"""Attention: its axes are batch, heads, and queries where no mask is implied; two products for each head."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from lowtide.ir.graph import Arg, Node, Value
from lowtide.ir.operators.axes.axis import Axis, Role
from lowtide.ir.operators.axes.builders import SUM, axis
from lowtide.ir.operators.nests import Access, Nest, NestLoop
from lowtide.ir.operators.row import Draws, Fusion, Operator
from lowtide.ir.operators.shapes import shape_of


def attention(node: Node) -> Iterator[Axis]:
    """query[b, h, q, e], key[b, h, k, e], value, dropout, causal -> result[b, h, q, e], logarithms[b, h, q]."""
    for dim in (0, 1):
        yield from axis(node, {0: dim, 1: dim, 2: dim, **_mask(node, dim)}, {0: dim, 1: dim})
    if node.args[4:5] in ((), (False,)):
        yield from axis(node, {0: 2, **_mask(node, 2)}, {0: 2, 1: 2})


def attention_backward(node: Node) -> Iterator[Axis]:
    """gradient, query, key, value, result, logarithms, dropout, causal -> gradients of query, key, value."""
    for dim in (0, 1):
        yield from axis(node, {**dict.fromkeys(range(6), dim), **_mask(node, dim)}, {0: dim, 1: dim, 2: dim})
    if node.args[7] is False:
        made: dict[int, Role] = {0: 2, 1: SUM, 2: SUM}
        yield from axis(node, {0: 2, 1: 2, 4: 2, 5: 2, **_mask(node, 2)}, made)


def _mask(node: Node, dim: int) -> dict[Any, int]:
    """Where a mask, [b, h, q, k] or [q, k], is cut along with a dimension."""
    mask: Arg = dict(node.kwargs).get("attn_mask")
    at = dim - 4
    return {("attn_mask",): at} if isinstance(mask, Value) and len(mask.shape) >= -at and mask.shape[at] != 1 else {}


def multiplications(node: Node) -> int:
    """Two products of matrices for each head: `q k^T` and `p v`."""
    query, key, value = (shape_of(node, position) for position in (0, 1, 2))
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def multiplications_backward(node: Node) -> int:
    """`q k^T` once more, and the gradients of p, v, q and k: five products."""
    query, key, value = (shape_of(node, position) for position in (1, 2, 3))
    return 2 * prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def loops(node: Node) -> Nest | None:
    """query[b, h, q, e], key[b, h, k, e], value[b, h, k, v]: two products, over e and over k."""
    query, key, value = node.args[:3]
    if not (isinstance(query, Value) and isinstance(key, Value) and isinstance(value, Value)) or len(query.shape) != 4:
        return None
    (b, h, q, e), k, v = shape_of(node, 0), shape_of(node, 1)[2], shape_of(node, 2)[3]
    loops = (NestLoop("b", b), NestLoop("h", h), NestLoop("q", q), NestLoop("k", k, True), NestLoop("e", e, True), NestLoop("v", v))
    named = ((query, "bhqe"), (key, "bhke"), (value, "bhkv"))
    return Nest(loops, tuple(Access(each, tuple(((letter, 1),) for letter in letters)) for each, letters in named))


def _forward(name: str, probability: int, **columns: Any) -> Operator:
    """Attention that draws where its probability of dropout is not zero, which is the argument at a position."""
    return Operator(name=f"aten.{name}", draws=Draws.WITH_PROBABILITY, probability=probability, **columns)


_GENERATED: dict[str, Any] = {"nest": loops, "fusion": Fusion.COMPLEX}

ROWS = (
    _forward("_scaled_dot_product_flash_attention_for_cpu", 3, axes=attention, flops=multiplications, **_GENERATED),
    _forward("_scaled_dot_product_flash_attention", 3, flops=multiplications),
    _forward("_scaled_dot_product_flash_attention.quantized", 6, flops=multiplications),
    _forward("_scaled_dot_product_efficient_attention", 5, flops=multiplications),
    _forward("_scaled_dot_product_cudnn_attention", 5, flops=multiplications),
    _forward("_scaled_dot_product_attention_math", 4, **_GENERATED),
    _forward("_scaled_dot_product_attention_math_for_mps", 4),
    _forward("scaled_dot_product_attention", 4, **_GENERATED),
    Operator(name="aten._scaled_dot_product_fused_attention_overrideable", draws=Draws.ALWAYS),
    Operator(name="aten._cudnn_attention_forward", draws=Draws.ALWAYS),
    Operator(name="aten._efficient_attention_forward", draws=Draws.ALWAYS),
    Operator(name="aten._flash_attention_forward", draws=Draws.ALWAYS),
    Operator(name="aten._flash_attention_forward_no_dropout_inplace", draws=Draws.ALWAYS),
    Operator(name="aten._fill_mem_eff_dropout_mask_", draws=Draws.ALWAYS),
    Operator(name="aten._fused_sdp_choice", draws=Draws.ALWAYS),
    Operator(name="aten._triton_scaled_dot_attention", draws=Draws.ALWAYS),
    Operator(name="aten._scaled_dot_product_flash_attention_for_cpu_backward", axes=attention_backward, flops=multiplications_backward),
    Operator(name="aten._scaled_dot_product_flash_attention_backward", flops=multiplications_backward),
    Operator(name="aten._scaled_dot_product_efficient_attention_backward", draws=Draws.AGAIN, flops=multiplications_backward),
    Operator(name="aten._scaled_dot_product_cudnn_attention_backward", draws=Draws.AGAIN, flops=multiplications_backward),
    Operator(name="aten._cudnn_attention_backward", draws=Draws.AGAIN),
)
