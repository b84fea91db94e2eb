"""What an operator is to a generator of kernels: complex, simple, or not known (AGO, section II).

A complex operator has loops that reduce: a convolution, a product. A simple one only maps, moves or reduces what is there once: it can be
a prologue or an epilogue of a complex one. Of what is neither nothing is generated: torch runs it.
"""

from __future__ import annotations

from enum import Enum

from lowtide.ir.operators.table import functional_base


class Fusion(Enum):
    """How an operator may be part of a generated kernel."""

    COMPLEX = "a convolution or a product"
    SIMPLE = "elementwise, a norm, a reduction, a window or a change of layout"
    NONE = "nothing is generated for it"


_COMPLEX = frozenset({
    "convolution", "mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math",
})  # fmt: skip

_ELEMENTWISE = frozenset({
    "add", "sub", "rsub", "mul", "div", "neg", "abs", "reciprocal", "sqrt", "rsqrt", "exp", "log", "tanh", "sigmoid", "erf", "pow",
    "square", "relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max", "hardswish", "hardsigmoid", "silu", "gelu", "elu",
    "leaky_relu", "mish", "maximum", "minimum", "where", "masked_fill", "prelu", "softplus",
})  # fmt: skip

_NORMS = frozenset({
    "native_batch_norm", "_native_batch_norm_legit_no_training", "_batch_norm_no_update", "native_layer_norm", "native_group_norm",
    "_softmax", "_log_softmax", "_safe_softmax",
})  # fmt: skip

_REDUCTIONS = frozenset({
    "mean", "sum", "amax", "amin", "avg_pool2d", "max_pool2d_with_indices", "_adaptive_avg_pool2d", "adaptive_avg_pool2d",
})  # fmt: skip

_MOVES = frozenset({
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "squeeze", "unsqueeze", "expand", "slice", "select", "split", "chunk",
    "split_with_sizes", "unbind", "cat", "stack", "clone", "detach", "alias", "constant_pad_nd", "embedding", "_to_copy", "roll",
})  # fmt: skip

_SIMPLE = _ELEMENTWISE | _NORMS | _REDUCTIONS | _MOVES

# What gradients and updates are made of beside these.
_TRAINING = frozenset({
    "gelu_backward", "threshold_backward", "hardtanh_backward", "hardswish_backward", "hardsigmoid_backward", "silu_backward",
    "sigmoid_backward", "tanh_backward", "elu_backward", "leaky_relu_backward", "softplus_backward", "mish_backward",
    "native_layer_norm_backward", "native_group_norm_backward", "native_batch_norm_backward", "_softmax_backward_data",
    "_log_softmax_backward_data", "lerp", "addcmul", "addcdiv", "sign", "sin", "cos", "eq", "ne", "lt", "le", "gt", "ge", "logical_and",
    "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not", "ones_like", "zeros_like", "full_like", "var", "rms_norm",
})  # fmt: skip
_APART = frozenset({"avg_pool2d", "max_pool2d_with_indices", "_adaptive_avg_pool2d", "adaptive_avg_pool2d", "embedding", "roll"})
_SCALED = frozenset({"add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv"})


def fusion_of(op: str) -> Fusion:
    """What the operator of a node is: "aten.convolution.default" is complex, "aten.relu_.default" as simple as "aten.relu.default"."""
    namespace, _, name = functional_base(op).partition(".")
    if namespace != "aten":
        return Fusion.NONE
    if name in _COMPLEX:
        return Fusion.COMPLEX
    return Fusion.SIMPLE if name in _SIMPLE else Fusion.NONE


def is_elementwise(op: str) -> bool:
    """Whether a simple operator maps each element by itself, broadcast apart."""
    namespace, _, name = functional_base(op).partition(".")
    return namespace == "aten" and name in _ELEMENTWISE


def is_fusible(op: str) -> bool:
    """Whether a training step's operator is elementwise, a norm, a reduction or a change of layout: what gains by sharing a kernel."""
    namespace, _, name = functional_base(op).partition(".")
    return namespace == "aten" and name in (_SIMPLE | _TRAINING) - _APART


def may_be_scaled(op: str) -> bool:
    """Whether a number that differs from call to call may be among its arguments: what it does is a few sums and products."""
    return functional_base(op).removeprefix("aten.") in _SCALED
