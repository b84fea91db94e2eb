"""Rows of what multiplies matrices: products, convolutions, attention.

Floating-point operations of products, from shapes alone. A multiplication and an addition are two operations.
"""

from __future__ import annotations

from math import prod

from lowtide.ir.graph import Node
from lowtide.ir.operators.row import Count, Draws, MaskSplit, Operator
from lowtide.ir.operators.shapes import made_shape, shape_of
from lowtide.ir.operators.traffic import convolution_gradients


def matrices(left: int, right: int) -> Count:
    """`[..., m, k] @ [..., k, n]`, at these positions: 2 m k n for each of the batch."""
    return lambda node: 2 * prod(shape_of(node, left)) * shape_of(node, right)[-1]


def vectors(left: int, right: int) -> Count:
    """`[m, k] @ [k]`, `[k] @ [k]` and `[m] x [n]`: every element of the larger one, or of the result, is a product added up."""
    return lambda node: 2 * max(prod(shape_of(node, left)), prod(made_shape(node, 0)), prod(shape_of(node, right)))


def convolution(node: Node) -> int:
    """Each element of the result is a sum over one kernel; transposed, each element of the input is spread over one."""
    shape = shape_of(node, 0) if node.args[6] else made_shape(node, 0)
    return 2 * shape[0] * prod(shape[2:]) * prod(shape_of(node, 1))


def convolution_backward(transposed: int) -> Count:
    """The gradients of input and weight are convolutions of as many operations as the forward one; that of the bias is a sum."""

    def count(node: Node) -> int:
        spread = shape_of(node, 1) if node.args[transposed] else shape_of(node, 0)
        each = 2 * spread[0] * prod(spread[2:]) * prod(shape_of(node, 2))
        return each * sum(output is not None for output in node.outputs[:2])

    return count


def attention(node: Node) -> int:
    """Two products of matrices for each head: `q k^T` and `p v`."""
    query, key, value = (shape_of(node, position) for position in (0, 1, 2))
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def attention_backward(node: Node) -> int:
    """`q k^T` once more, and the gradients of p, v, q and k: five products."""
    query, key, value = (shape_of(node, position) for position in (1, 2, 3))
    return 2 * prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


# Backends compute the gradient of the input by one kernel, and those of weight and bias by another.
_GRADIENTS = ((0,), (1, 2))

_PRODUCTS = (
    Operator(name="aten.mm", flops=matrices(0, 1), in_layout="lowtide.mm_in_layout.default"),
    Operator(name="aten.bmm", flops=matrices(0, 1), in_layout="lowtide.bmm_in_layout.default"),
    Operator(name="aten.matmul", flops=matrices(0, 1)),
    Operator(name="aten.addmm", flops=matrices(1, 2), in_layout="lowtide.addmm_in_layout.default"),
    Operator(name="aten.baddbmm", flops=matrices(1, 2), in_layout="lowtide.baddbmm_in_layout.default"),
    Operator(name="aten.addbmm", flops=matrices(1, 2), in_layout="lowtide.addbmm_in_layout.default"),
    *(Operator(name=f"lowtide.{name}_in_layout", flops=matrices(0, 1)) for name in ("mm", "bmm")),
    *(Operator(name=f"lowtide.{name}_in_layout", flops=matrices(1, 2)) for name in ("addmm", "baddbmm", "addbmm")),
    Operator(name="aten.mv", flops=vectors(0, 1)),
    Operator(name="aten.dot", flops=vectors(0, 1)),
    Operator(name="aten.vdot", flops=vectors(0, 1)),
    Operator(name="aten.addmv", flops=vectors(1, 2)),
    Operator(name="aten.addr", flops=vectors(1, 2)),
)

_CONVOLUTIONS = (
    Operator(name="aten.convolution", flops=convolution),
    Operator(name="aten.convolution_overrideable", flops=convolution),
    Operator(
        name="aten.convolution_backward",
        flops=convolution_backward(transposed=7),
        moved_bytes=convolution_gradients,
        split=MaskSplit(mask=10, groups=_GRADIENTS),
    ),
    Operator(
        name="aten.convolution_backward_overrideable",
        flops=convolution_backward(transposed=6),
        moved_bytes=convolution_gradients,
        split=MaskSplit(mask=9, groups=_GRADIENTS),
    ),
)

_MAYBE = Draws.WITH_PROBABILITY

_ATTENTION = (
    Operator(name="aten._scaled_dot_product_flash_attention_for_cpu", draws=_MAYBE, probability=3, flops=attention),
    Operator(name="aten._scaled_dot_product_flash_attention", draws=_MAYBE, probability=3, flops=attention),
    Operator(name="aten._scaled_dot_product_flash_attention.quantized", draws=_MAYBE, probability=6, flops=attention),
    Operator(name="aten._scaled_dot_product_efficient_attention", draws=_MAYBE, probability=5, flops=attention),
    Operator(name="aten._scaled_dot_product_cudnn_attention", draws=_MAYBE, probability=5, flops=attention),
    Operator(name="aten._scaled_dot_product_attention_math", draws=_MAYBE, probability=4),
    Operator(name="aten._scaled_dot_product_attention_math_for_mps", draws=_MAYBE, probability=4),
    Operator(name="aten.scaled_dot_product_attention", draws=_MAYBE, probability=4),
    Operator(name="aten._scaled_dot_product_fused_attention_overrideable", draws=Draws.ALWAYS),
    Operator(name="aten._cudnn_attention_forward", draws=Draws.ALWAYS),
    Operator(name="aten._efficient_attention_forward", draws=Draws.ALWAYS),
    Operator(name="aten._flash_attention_forward", draws=Draws.ALWAYS),
    Operator(name="aten._flash_attention_forward_no_dropout_inplace", draws=Draws.ALWAYS),
    Operator(name="aten._fill_mem_eff_dropout_mask_", draws=Draws.ALWAYS),
    Operator(name="aten._fused_sdp_choice", draws=Draws.ALWAYS),
    Operator(name="aten._triton_scaled_dot_attention", draws=Draws.ALWAYS),
    Operator(name="aten._scaled_dot_product_flash_attention_for_cpu_backward", flops=attention_backward),
    Operator(name="aten._scaled_dot_product_flash_attention_backward", flops=attention_backward),
    Operator(name="aten._scaled_dot_product_efficient_attention_backward", draws=Draws.AGAIN, flops=attention_backward),
    Operator(name="aten._scaled_dot_product_cudnn_attention_backward", draws=Draws.AGAIN, flops=attention_backward),
    Operator(name="aten._cudnn_attention_backward", draws=Draws.AGAIN),
)

ROWS = (*_PRODUCTS, *_CONVOLUTIONS, *_ATTENTION)
