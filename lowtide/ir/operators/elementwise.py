"""What works element by element: every dimension of the result is an axis, in every argument that has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.axes.axis import Axis, tensor_paths
from lowtide.ir.operators.axes.builders import NodeLocation, axis
from lowtide.ir.operators.row import Fusion, Operator, ReadsResult


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


def pointwise(names: str, **columns: Any) -> Iterator[Operator]:
    """A row for each of the names, "abs acos"."""
    yield from (Operator(name=f"aten.{name}", axes=broadcast, any_strides=True, **columns) for name in names.split())


_GENERATED: dict[str, Any] = {"fusion": Fusion.ELEMENTWISE, "fusible": True}

# Those that torch tags as pointwise, and that draw nothing.
TAGGED = (
    *pointwise(
        "__lshift__ __rshift__ __xor__ _conj_physical acos acosh angle asin asinh atan atan2 atanh bitwise_left_shift bitwise_right_shift "
        "bitwise_xor ceil celu conj_physical copysign cosh deg2rad digamma erfc erfinv exp2 expm1 floor fmax fmin fmod gcd hardshrink "
        "heaviside hypot i0 igamma igammac isfinite isinf isnan isneginf isposinf lcm lgamma log10 log1p log2 logaddexp logaddexp2 "
        "logical_xor logit logit_backward max.other min.other nan_to_num native_dropout_backward nextafter polygamma positive rad2deg "
        "remainder round selu sgn signbit sinc sinh softshrink special_entr special_erfcx special_i0e special_i1 special_i1e "
        "special_log_ndtr special_ndtri special_xlog1py special_zeta tan threshold trunc xlogy"
    ),
    *pointwise(
        "abs clamp clamp_max clamp_min elu erf exp gelu hardsigmoid hardtanh leaky_relu log masked_fill maximum minimum mish neg pow "
        "reciprocal relu relu6 rsqrt rsub sigmoid silu softplus sqrt square tanh where",
        **_GENERATED,
    ),
    *pointwise("add sub mul div", **_GENERATED, scaled=True),
    *pointwise("addcdiv addcmul lerp", fusible=True, scaled=True),
    *pointwise(
        "bitwise_and bitwise_not bitwise_or cos eq ge gelu_backward gt le logical_and logical_not logical_or lt ne sigmoid_backward sign "
        "silu_backward sin tanh_backward threshold_backward",
        fusible=True,
    ),
)

# Without the tag: gradients, and operators of an older kind.
UNTAGGED = (
    *pointwise(
        "__and__ __or__ _prelu_kernel _prelu_kernel_backward floor_divide hardshrink_backward log_sigmoid_backward softshrink_backward"
    ),
    *pointwise("hardswish", **_GENERATED),
    *pointwise(
        "elu_backward hardsigmoid_backward hardswish_backward hardtanh_backward leaky_relu_backward mish_backward softplus_backward",
        fusible=True,
    ),
)

# One overload more exactly.
_OVERLOADS = (
    # One rounding of the exact result, as IEEE 754 wants it of scalar and vector instructions alike.
    *(Operator(name=f"aten.{name}.Tensor", rounds_once=True) for name in ("add", "sub", "mul", "div")),
    Operator(name="aten.div_.Tensor", complex_in_place="lowtide.divided.default"),
    Operator(name="aten.elu_backward.default", elementwise=True),
    Operator(name="aten.softplus_backward.default", elementwise=True),
    # x <= a or x >= b, and min(max(x, a), b) <= a or >= b, are the same question
    Operator(
        name="aten.hardtanh_backward.default", elementwise=True, reads_result=ReadsResult("aten.hardtanh.default", (-1, 1), bounds=True)
    ),
    # x > 0, and (x if x > 0 else s * x) > 0, are the same question if s > 0
    Operator(
        name="aten.leaky_relu_backward.default", elementwise=True, reads_result=ReadsResult("aten.leaky_relu.default", (0.01,), rising=0)
    ),
)

ROWS = (*TAGGED, *UNTAGGED, *_OVERLOADS, Operator(name="aten.prelu", **_GENERATED))
