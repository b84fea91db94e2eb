"""Rules of what works element by element: every dimension of the result is an axis, in every argument that has it."""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.axes.axis import Axis, tensor_paths
from lowtide.ir.operators.axes.builders import NodeLocation, Rule, axis

# Those that torch tags as pointwise, and that draw nothing.
TAGGED = (
    "__lshift__", "__rshift__", "__xor__", "_conj_physical", "abs", "acos", "acosh", "add", "addcdiv", "addcmul",
    "angle", "asin", "asinh", "atan", "atan2", "atanh", "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or",
    "bitwise_right_shift", "bitwise_xor", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clone", "conj_physical", "copysign", "cos",
    "cosh", "deg2rad", "digamma", "div", "elu", "eq", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "floor", "fmax", "fmin", "fmod",
    "gcd", "ge", "gelu", "gelu_backward", "gt", "hardshrink", "hardsigmoid", "hardtanh", "heaviside", "hypot", "i0", "igamma", "igammac",
    "isfinite", "isinf", "isnan", "isneginf", "isposinf", "lcm", "le", "leaky_relu", "lerp", "lgamma", "log", "log10", "log1p", "log2",
    "logaddexp", "logaddexp2", "logical_and", "logical_not", "logical_or", "logical_xor", "logit", "logit_backward", "lt", "masked_fill",
    "max.other", "maximum", "min.other", "minimum", "mish", "mul", "nan_to_num", "native_dropout_backward", "ne", "neg", "nextafter",
    "polygamma", "positive", "pow", "rad2deg", "reciprocal", "relu", "relu6", "remainder", "round", "rsqrt", "rsub", "selu", "sgn",
    "sigmoid", "sigmoid_backward", "sign", "signbit", "silu", "silu_backward", "sin", "sinc", "sinh", "softplus", "softshrink",
    "special_entr", "special_erfcx", "special_i0e", "special_i1", "special_i1e", "special_log_ndtr", "special_ndtri",
    "special_xlog1py", "special_zeta", "sqrt", "square", "sub", "tan", "tanh", "tanh_backward", "threshold", "threshold_backward", "trunc",
    "where", "xlogy",
)  # fmt: skip

# Without the tag: copies, views of everything, gradients, and what asks its first argument for its looks alone.
UNTAGGED = (
    "__and__", "__or__", "_prelu_kernel", "_prelu_kernel_backward", "_to_copy", "alias", "copy", "detach", "elu_backward",
    "empty_like", "fill", "floor_divide", "full_like", "hardshrink_backward", "hardsigmoid_backward", "hardswish",
    "hardswish_backward", "hardtanh_backward", "leaky_relu_backward", "lift_fresh", "lift_fresh_copy", "log_sigmoid_backward",
    "mish_backward", "ones_like", "softplus_backward", "softshrink_backward", "zero", "zeros_like",
)  # fmt: skip


def broadcast(node: Node) -> Iterator[Axis]:
    """Results of one shape, to which all arguments are broadcast."""
    if not node.results:
        return
    made = node.results[0]
    rank = len(made.shape)
    if any(value is not None and value.shape != made.shape for value in node.outputs):
        return
    for dim in range(rank):
        sliced: NodeLocation = {path: dim - rank for path, value in tensor_paths(node) if _spans(value, made, dim - rank)}
        yield from axis(node, sliced, dict.fromkeys(range(len(node.outputs)), dim))


def _spans(value: Value, made: Value, dim: int) -> bool:
    """Whether an argument has a result's dimension, counted from the back, and is not broadcast along it."""
    return len(value.shape) >= -dim and value.shape[dim] != 1 and made.shape[dim] != 1


RULES: dict[str, Rule] = {f"aten.{name}": broadcast for name in (*TAGGED, *UNTAGGED)}
