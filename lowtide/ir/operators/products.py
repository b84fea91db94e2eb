"""Rows of what multiplies matrices: products, convolutions, attention."""

from __future__ import annotations

from lowtide.ir.operators.flops import attention, attention_backward, convolution, convolution_backward, matrices, vectors
from lowtide.ir.operators.moved import convolution_gradients
from lowtide.ir.operators.row import Draws, MaskSplit, Operator

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
