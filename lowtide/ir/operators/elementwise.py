"""What works element by element; and what gets memory, copies it or fills it, with random numbers too.

Every dimension of the result is an axis, in every argument that has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.axes import Axis, DimsByArgument, axis, tensor_paths
from lowtide.ir.operators.row import AxesRule, Draws, Fake, Fusion, Operator, ReadsResult, WithWrites


def broadcast(node: Node) -> Iterator[Axis]:
    """Results of one shape, to which all arguments are broadcast."""
    if not node.results:
        return
    result = node.results[0]
    rank = len(result.shape)
    if any(value is not None and value.shape != result.shape for value in node.outputs):
        return
    for dim in range(rank):
        sliced: DimsByArgument = {path: dim - rank for path, value in tensor_paths(node) if _spans(value, result, dim - rank)}
        yield from axis(node, sliced, dict.fromkeys(range(len(node.outputs)), dim))


def _spans(value: Value, result: Value, dim: int) -> bool:
    """Whether an argument has a result's dimension, counted from the back, and is not broadcast along it."""
    return len(value.shape) >= -dim and value.shape[dim] != 1 and result.shape[dim] != 1


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
    *(Operator(name=f"aten.{name}.Tensor", rounds_once=True) for name in ("add", "sub", "div")),
    Operator(name="aten.mul.Tensor", rounds_once=True, by_tensor="Tensor"),
    *(Operator(name=f"aten.{name}.Scalar", by_tensor="Tensor") for name in ("mul", "_foreach_mul", "_foreach_div")),
    Operator(name="aten.mul.out", by_tensor="out"),
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

_ELEMENTWISE = (*TAGGED, *UNTAGGED, *_OVERLOADS, Operator(name="aten.prelu", **_GENERATED))


# Random where they run, and nothing else is known of them.
_PLAIN = (
    "_cudnn_init_dropout_state", "_fused_dropout", "_lstm_mps", "_nested_tensor_softmax_with_shape", "_sample_dirichlet",
    "_standard_gamma", "alpha_dropout", "bernoulli", "binomial", "cauchy", "dropout", "feature_alpha_dropout", "feature_dropout",
    "geometric", "gru", "log_normal", "lstm", "miopen_rnn", "multinomial", "native_dropout", "normal", "poisson", "rand", "randint",
    "randn", "randperm", "rnn_relu", "rnn_tanh", "rrelu", "rrelu_with_noise", "rrelu_with_noise_functional",
)  # fmt: skip

# What they are given says how much to draw.
_OVERWRITING = ("exponential", "normal_functional", "rand_like", "randint_like", "randn_like", "random", "uniform")

_NOISE = "aten.rrelu_with_noise_functional.default"

_DRAWS = (
    *(Operator(name=f"aten.{name}", draws=Draws.ALWAYS) for name in _PLAIN),
    *(Operator(name=f"aten.{name}", draws=Draws.ALWAYS, unread=(0,)) for name in _OVERWRITING),
    Operator(name="aten._cudnn_rnn", draws=Draws.WITH_PROBABILITY, probability=11, fake=Fake.CUDNN_RNN),
    Operator(name="lowtide.cudnn_rnn", draws=Draws.ALWAYS, fake=Fake.CUDNN_RNN),
    *(Operator(name=f"{name}_backward", fake=Fake.CUDNN_RNN, once=True) for name in ("aten._cudnn_rnn", "lowtide.cudnn_rnn")),
    Operator(name="lowtide.truncated_normal", draws=Draws.ALWAYS, unread=(0,)),
    Operator(name="aten.bernoulli_", draws=Draws.ALWAYS, unread=(0,)),
    Operator(name="aten.bernoulli.p", draws=Draws.ALWAYS, unread=(0,)),
    Operator(name="aten.bernoulli.Tensor", draws=Draws.ALWAYS, unread=(0,)),
    Operator(name="aten.bernoulli_.float", draws=Draws.ALWAYS, unread=(0,), in_memory_order=True, functional="aten.bernoulli.p"),
    Operator(name="aten.normal_.default", draws=Draws.ALWAYS, unread=(0,), functional="aten.normal_functional.default"),
    Operator(name="aten.rrelu_with_noise.default", draws=Draws.ALWAYS, with_writes=WithWrites(_NOISE, own=1)),
    Operator(name="aten.rrelu_with_noise_.default", draws=Draws.ALWAYS, with_writes=WithWrites(_NOISE, own=0)),
)


def filled(sizes_at: int) -> AxesRule:
    """A tensor of sizes that are given, the same everywhere."""

    def rule(node: Node) -> Iterator[Axis]:
        for dim in range(len(node.results[0].shape)):
            yield from axis(node, {}, {0: dim}, [(sizes_at, dim)])

    return rule


def strided(node: Node) -> Iterator[Axis]:
    """x, sizes, strides: the outermost dimension in memory, as strides stay what they are."""
    result = node.results[0]
    if not all(isinstance(step, int) for step in result.stride):
        return
    dims = [dim for dim, extent in enumerate(result.shape) if extent != 1]
    if dims:
        dim = max(dims, key=lambda each: result.stride[each])
        yield from axis(node, {}, {0: dim}, [(1, dim)])


_IN_KERNELS: dict[str, Any] = {"fusion": Fusion.SIMPLE, "fusible": True}

_LIKE = (
    *pointwise("clone _to_copy", **_IN_KERNELS),
    *pointwise("alias detach", view=True, **_IN_KERNELS),
    *pointwise("lift_fresh", view=True),
    *pointwise("lift_fresh_copy"),
    *pointwise("copy fill zero", unread=(0,)),
    *pointwise("full_like ones_like zeros_like", unread=(0,), fusible=True),
    *pointwise("empty_like", untouched=True),
    # The form that takes sizes in the place of a tensor of these sizes.
    Operator(name="aten.empty_like.default", of_sizes="aten.empty.memory_format"),
    Operator(name="aten.zeros_like.default", of_sizes="aten.zeros.default"),
    Operator(name="aten.ones_like.default", of_sizes="aten.ones.default"),
)

_OF_SIZES = (
    Operator(name="aten.zeros", axes=filled(0)),
    Operator(name="aten.ones", axes=filled(0)),
    Operator(name="aten.full", axes=filled(0)),
    Operator(name="aten.empty", untouched=True),
    Operator(name="aten.empty.memory_format", axes=filled(0)),
    Operator(name="aten.empty_strided", untouched=True),
    Operator(name="aten.new_zeros", axes=filled(1), unread=(0,)),
    Operator(name="aten.new_ones", axes=filled(1), unread=(0,)),
    Operator(name="aten.new_full", axes=filled(1), unread=(0,)),
    Operator(name="aten.new_empty", axes=filled(1), untouched=True),
    Operator(name="aten.new_empty_strided", axes=strided, untouched=True),
    Operator(name="aten.linspace.default", fake=Fake.FIXES_SIZES),
    Operator(name="aten.logspace.default", fake=Fake.FIXES_SIZES),
    Operator(name="aten.linalg_lstsq.default", fake=Fake.ASKS_DATA_FOR_SHAPES),
)

_UPDATES = (
    *(Operator(name=f"aten._fused_{name}", gradients=1, first=f"lowtide.first_{name}") for name in ("sgd", "adam", "adamw")),
    Operator(name="aten._fused_adagrad", gradients=1),
    # Gradients and tables of codes.
    Operator(name="bitsandbytes.optimizer_update_32bit", only_reads=(1,)),
    Operator(name="bitsandbytes.optimizer_update_8bit_blockwise", only_reads=(1, 12, 13)),
)

ROWS = (*_ELEMENTWISE, *_LIKE, *_OF_SIZES, *_DRAWS, *_UPDATES)
