"""What takes many elements together: sums, means, extrema, softmax, sorting; norms, losses; and what looks around within a plane.

The axes of the former are by the dimensions that they run over.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from lowtide.errors import of_kind
from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.axes import MEAN, SAME, SUM, Axis, Combine, DimsByArgument, Reduced, Role, axis, dims_of, given, number
from lowtide.ir.operators.row import AxesRule, Bounds, Fake, Fusion, Indices, Operator, Statistics, WithWrites, bytes_of, ints, read_bytes
from lowtide.ir.sizes import ITEM_BYTES

_NONE, _MEAN, _SUM = 0, 1, 2  # torch's reductions of losses


def over(combine: Reduced | None, dims_at: int | None = 1, keepdim_at: int = 2) -> AxesRule:
    """Named dimensions are reduced, by `combine`, or closed where there is none; all others map. `dims_at` None: all are reduced."""

    def rule(node: Node) -> Iterator[Axis]:
        rank = len(of_kind(Value, node.args[0]).shape)
        reduced = tuple(range(rank)) if dims_at is None else dims_of(node, dims_at, rank)
        keeps = dims_at is not None and number(node, keepdim_at, "keepdim", 0) is True
        for dim in range(rank):
            if dim not in reduced:
                to = dim if keeps else dim - sum(each < dim for each in reduced)
                yield from axis(node, {0: dim}, dict.fromkeys(range(len(node.outputs)), to))
            elif combine is not None:
                roles: dict[int, Role] = {0: combine}
                yield from axis(node, {0: dim}, roles)

    return rule


def named(position: int) -> AxesRule:
    """All dimensions of all tensors but the one that an argument names: softmax, cumsum, sort, topk, where shapes agree on it."""

    def rule(node: Node) -> Iterator[Axis]:
        rank = len(of_kind(Value, node.args[0]).shape)
        dim_of = of_kind(int, number(node, position, "dim", -1))
        for dim in range(rank):
            if dim != dim_of % rank:
                tensors = [at for at in range(len(node.args)) if (one := given(node, (at,))) is not None and len(one.shape) == rank]
                positions: DimsByArgument = dict.fromkeys(tensors, dim)
                yield from axis(node, positions, dict.fromkeys(range(len(node.outputs)), dim))

    return rule


def _row(name: str, rule: AxesRule, **columns: Any) -> Operator:
    return Operator(name=f"aten.{name}", axes=rule, any_strides=True, **columns)


_MOST, _LEAST, _PRODUCT = Reduced(Combine.MAX), Reduced(Combine.MIN), Reduced(Combine.PRODUCT)
_ANY, _ALL = Reduced(Combine.ANY), Reduced(Combine.ALL)
_GENERATED: dict[str, Any] = {"fusion": Fusion.SIMPLE, "fusible": True}

_SUMS = (
    _row("sum", over(SUM), **_GENERATED),
    _row("sum.default", over(SUM, None)),
    _row("mean", over(MEAN), **_GENERATED),
    _row("mean.default", over(MEAN, None)),
    _row("amax", over(_MOST), **_GENERATED),
    _row("amin", over(_LEAST), **_GENERATED),
    _row("max.default", over(_MOST, None)),
    _row("max.dim", over(None), indices=Indices(1, 1)),
    _row("min.default", over(_LEAST, None)),
    _row("min.dim", over(None), indices=Indices(1, 1)),
    _row("prod.default", over(_PRODUCT, None)),
    _row("prod.dim_int", over(_PRODUCT)),
    _row("any", over(_ANY)),
    _row("any.default", over(_ANY, None)),
    _row("all", over(_ALL)),
    _row("all.default", over(_ALL, None)),
    _row("argmax", over(None), indices=Indices(0, 1)),
    _row("argmin", over(None), indices=Indices(0, 1)),
    _row("logsumexp", over(None)),
    Operator(name="aten.var", fusible=True),
    _row("var.correction", over(None, keepdim_at=9)),
    _row("std.correction", over(None, keepdim_at=9)),
    _row("var_mean.correction", over(None, keepdim_at=9)),
    _row("linalg_vector_norm", over(None, dims_at=2, keepdim_at=3)),
    _row("norm.ScalarOpt_dim", over(None, dims_at=2, keepdim_at=3)),
    _row("norm.ScalarOpt_dim_dtype", over(None, dims_at=2, keepdim_at=3)),
    Operator(name="aten.median.dim", indices=Indices(1, 1)),
    Operator(name="aten.nanmedian.dim", indices=Indices(1, 1)),
    Operator(name="aten.mode", indices=Indices(1, 1, -1)),
    Operator(name="aten.kthvalue", indices=Indices(1, 2, -1)),
)

# Kernels of softmax on a CPU write an element once they have read all that they need of it: the result may lie where an argument does.
_ALONG = (
    _row("_softmax", named(1), in_memory_of="aten._softmax.out", **_GENERATED),
    _row("_log_softmax", named(1), in_memory_of="aten._log_softmax.out", **_GENERATED),
    _row("_safe_softmax", named(1), **_GENERATED),
    _row("_softmax_backward_data", named(2), in_memory_of="aten._softmax_backward_data.out", fusible=True),
    _row("_log_softmax_backward_data", named(2), in_memory_of="aten._log_softmax_backward_data.out", fusible=True),
    _row("cumsum", named(1)),
    _row("cumprod", named(1)),
    _row("logcumsumexp", named(1)),
    _row("cummax", named(1), indices=Indices(1, 1)),
    _row("cummin", named(1), indices=Indices(1, 1)),
    _row("sort", named(1), indices=Indices(1, 1, -1)),
    _row("sort.stable", named(2)),
    _row("argsort", named(1), indices=Indices(0, 1, -1)),
    _row("topk", named(2), indices=Indices(1, 2, -1)),
    _row("glu", named(1)),
    _row("glu_backward", named(2)),
)

_REDUCTIONS = (*_SUMS, *_ALONG)


def layer_norm(node: Node) -> Iterator[Axis]:
    """x[.., normalised], normalised shape, weight, bias: statistics keep the rank."""
    for dim in _outside(node, 0, 1):
        yield from axis(node, {0: dim}, {0: dim, 1: dim, 2: dim})


def layer_norm_backward(node: Node) -> Iterator[Axis]:
    """gradient, x, normalised shape, mean, invstd, weight, bias: gradients of weight and bias are sums."""
    for dim in _outside(node, 1, 2):
        yield from axis(node, {0: dim, 1: dim, 3: dim, 4: dim}, {0: dim, 1: SUM, 2: SUM})


def _outside(node: Node, position: int, normalised: int) -> range:
    """The dimensions that a layer norm does not normalise."""
    value, shape = given(node, (position,)), node.args[normalised]
    return range(len(value.shape) - len(shape)) if value is not None and isinstance(shape, tuple) else range(0)


def group_norm(node: Node) -> Iterator[Axis]:
    """x[n, c, ..], weight, bias, n, c, pixels, groups: statistics are [n, groups]."""
    yield from axis(node, {0: 0}, {0: 0, 1: 0, 2: 0}, [(3,)])
    yield from axis(node, {0: 1, 1: 0, 2: 0}, {0: 1, 1: 1, 2: 1}, [(4,), (6,)])


def group_norm_backward(node: Node) -> Iterator[Axis]:
    """gradient, x, mean, invstd, weight, n, c, pixels, groups."""
    yield from axis(node, {0: 0, 1: 0, 2: 0, 3: 0}, {0: 0, 1: SUM, 2: SUM}, [(5,)])
    yield from axis(node, {0: 1, 1: 1, 2: 1, 3: 1, 4: 0}, {0: 1, 1: 0, 2: 0}, [(6,), (8,)])


def batch_norm(node: Node) -> Iterator[Axis]:
    """x[n, c, ..], weight, bias, running mean and variance, training. Statistics of a batch close all dimensions but the channels."""
    value, training = of_kind(Value, node.args[0]), node.args[5] is not False
    kept: Role = 0 if training else SAME  # what is saved of a norm that takes no statistics is empty
    yield from axis(node, {0: 1, 1: 0, 2: 0, 3: 0, 4: 0}, {0: 1, 1: kept, 2: kept})
    if not training:
        for dim in (0, *range(2, len(value.shape))):
            yield from axis(node, {0: dim}, {0: dim, 1: SAME, 2: SAME})


def batch_norm_backward(node: Node) -> Iterator[Axis]:
    """gradient, x, weight, running mean and variance, saved mean and invstd, training."""
    value, training = of_kind(Value, node.args[1]), node.args[7] is not False
    saved: DimsByArgument = {5: 0, 6: 0} if training else {}
    yield from axis(node, {0: 1, 1: 1, 2: 0, 3: 0, 4: 0, **saved}, {0: 1, 1: 0, 2: 0})
    if not training:
        for dim in (0, *range(2, len(value.shape))):
            yield from axis(node, {0: dim, 1: dim}, {0: dim, 1: SUM, 2: SUM})


def likelihood(node: Node) -> Iterator[Axis]:
    """scores[n, c, ..], target[n, ..], weight, reduction -> loss, total weight. A mean is a sum over the sum of weights, at the end."""
    scores = of_kind(Value, node.args[0])
    if len(scores.shape) < 2:
        return
    reduction, total = number(node, 3, "reduction", _MEAN), node.outputs[1]
    for dim in (0, *range(2, len(scores.shape))):
        sliced: DimsByArgument = {0: dim, 1: dim - (dim > 0)}
        if reduction == _NONE:
            yield from axis(node, sliced, {0: sliced[1], 1: SAME})
        elif reduction == _SUM:
            yield from axis(node, sliced, {0: SUM, 1: SUM})
        elif total is not None and len(node.args) > 3:
            yield from axis(node, sliced, {0: Reduced(Combine.SUM, over=1), 1: SUM}, instead={(3,): _SUM})


def likelihood_backward(node: Node) -> Iterator[Axis]:
    """gradient, scores[n, c, ..], target[n, ..], weight, reduction, ignored, total weight: that of the whole."""
    scores = of_kind(Value, node.args[1])
    for dim in (0, *range(2, len(scores.shape))) if len(scores.shape) > 1 else ():
        target = dim - (dim > 0)
        by_element: DimsByArgument = {0: target} if node.args[4] == _NONE else {}
        yield from axis(node, {1: dim, 2: target, **by_element}, {0: dim})


def mean_square(node: Node) -> Iterator[Axis]:
    """x, target, reduction."""
    one, two = of_kind(Value, node.args[0]), of_kind(Value, node.args[1])
    if one.shape != two.shape:
        return
    reduction = number(node, 2, "reduction", _MEAN)
    for dim in range(len(one.shape)):
        role: Role = dim if reduction == _NONE else MEAN if reduction == _MEAN else SUM
        yield from axis(node, {0: dim, 1: dim}, {0: role})


def mean_square_backward(node: Node) -> Iterator[Axis]:
    """gradient, x, target, reduction; the gradient of a mean divides by the count of what it is given, so it is closed."""
    one, two = of_kind(Value, node.args[1]), of_kind(Value, node.args[2])
    if one.shape != two.shape or node.args[3] == _MEAN:
        return
    for dim in range(len(one.shape)):
        by_element: DimsByArgument = {0: dim} if node.args[3] == _NONE else {}
        yield from axis(node, {1: dim, 2: dim, **by_element}, {0: dim})


def planes(dims: int, sizes: int | None = None) -> AxesRule:
    """All but the last dimensions, in every tensor: what looks around in a plane, or in the last two dimensions of a matrix."""

    def rule(node: Node) -> Iterator[Axis]:
        tensors = [at for at in range(len(node.args)) if given(node, (at,)) is not None]
        value = given(node, (tensors[0],)) if tensors else None
        for dim in range(len(value.shape) - dims if value is not None else 0):
            sliced: DimsByArgument = dict.fromkeys(tensors, dim)
            yield from axis(node, sliced, dict.fromkeys(range(len(node.outputs)), dim), () if sizes is None else [(sizes, dim)])

    return rule


def columns(node: Node) -> Iterator[Axis]:
    """Windows as columns, and back: [n, c, ..] and [n, c * window, positions], or without n."""
    for dim in range(min(len(of_kind(Value, node.args[0]).shape), len(node.results[0].shape)) - 1):
        yield from axis(node, {0: dim}, {0: dim})


def likelihood_bytes(node: Node) -> int:
    """Of the scores one for each target is read."""
    scores, targets = of_kind(Value, node.args[0]), node.args[1]
    return read_bytes(node, (0,)) + prod(ints(node, targets)) * ITEM_BYTES[scores.dtype] + bytes_of(node.results)


def labels(node: Node, value: Value) -> Bounds | None:
    """The classes, and the label that says that an element does not count."""
    scores, ignored = node.args[0], node.args[4]
    if node.args[1] is not value or not isinstance(scores, Value) or not isinstance(ignored, int):
        return None
    classes = scores.shape[1 if len(scores.shape) > 1 else 0]
    return (min(0, ignored), max(classes - 1, ignored)) if isinstance(classes, int) else None


_RUNNING = (3, 4)  # mean and variance
_WITH_FLAG = Statistics(_RUNNING, flag=5)


def _with_form(name: str, statistics: Statistics, own: int = 2) -> Iterator[Operator]:
    """A norm that has lowtide's own form with what it writes, but for the overloads that are told where to write the rest."""
    yield Operator(name=f"aten.{name}", statistics=statistics)
    form = WithWrites(f"lowtide.{name}_functional.default", own)
    yield Operator(name=f"aten.{name}.default", statistics=statistics, with_writes=form)


_NORMS = (
    Operator(name="aten.native_layer_norm", axes=layer_norm, **_GENERATED),
    Operator(name="aten.native_layer_norm_backward", axes=layer_norm_backward, fusible=True),
    Operator(name="aten.native_group_norm", axes=group_norm, **_GENERATED),
    Operator(name="aten.native_group_norm_backward", axes=group_norm_backward, fusible=True),
    Operator(name="aten.native_batch_norm", axes=batch_norm, statistics=_WITH_FLAG, **_GENERATED),
    Operator(
        name="aten.native_batch_norm.default",
        statistics=Statistics(_RUNNING, flag=5, without="aten.native_batch_norm.default"),
        with_writes=WithWrites("aten._native_batch_norm_legit_functional.default", own=3),
        fake=Fake.STATISTICS_TYPE,
        epsilon=7,
    ),
    Operator(name="aten.native_batch_norm_backward", axes=batch_norm_backward, fusible=True),
    Operator(name="aten._native_batch_norm_legit_no_training", epsilon=6, **_GENERATED),
    Operator(name="aten._batch_norm_no_update", **_GENERATED),
    Operator(name="aten._batch_norm_impl_index", statistics=_WITH_FLAG),
    *_with_form("cudnn_batch_norm", Statistics(_RUNNING, flag=5, without="lowtide.cudnn_batch_norm.default"), own=4),
    Operator(name="lowtide.cudnn_batch_norm", scratch_like=(1, 1)),
    *_with_form("miopen_batch_norm", _WITH_FLAG, own=3),
    *_with_form("batch_norm_gather_stats", Statistics(_RUNNING, flag=None)),
    *_with_form("batch_norm_gather_stats_with_counts", Statistics(_RUNNING, flag=None)),
    *_with_form("batch_norm_update_stats", Statistics((1, 2), flag=None)),
    Operator(name="aten.rms_norm", fusible=True),
    Operator(name="aten._transformer_encoder_layer_fwd.default", fake=Fake.MISSING),
)

# Gradients of losses and pools ask their input for its shape alone.
_LOSSES = (
    *(
        Operator(name=f"aten.{name}_forward", axes=likelihood, moved_bytes=likelihood_bytes, refuses=labels)
        for name in ("nll_loss", "nll_loss2d")
    ),
    *(Operator(name=f"aten.{name}_backward", axes=likelihood_backward, unread=(1,)) for name in ("nll_loss", "nll_loss2d")),
    Operator(name="aten.mse_loss", axes=mean_square),
    Operator(name="aten.mse_loss_backward", axes=mean_square_backward),
    *(
        Operator(name=f"aten.{name}.default", fake=Fake.KEEPS_ELEMENTS)
        for name in ("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy")
    ),
    Operator(name="aten.multilabel_margin_loss_forward.default", fake=Fake.LOSS_OF_ONE),
    Operator(name="aten._ctc_loss.default", shaped_by=()),
    Operator(name="aten._ctc_loss.Tensor", shaped_by=(2, 3)),
    Operator(name="aten._use_cudnn_ctc_loss.Tensor", answers_without_data=True, shaped_by=(1, 2, 3)),
    Operator(name="aten._use_miopen_ctc_loss.Tensor", answers_without_data=True, shaped_by=(1, 2, 3)),
)


def _pool(name: str, dims: int, **columns: Any) -> Iterator[Operator]:
    """A pool over so many dimensions, and its gradient."""
    yield Operator(name=f"aten.{name}", axes=planes(dims), **columns)
    yield Operator(name=f"aten.{name}_backward", axes=planes(dims), unread=(1,))


_RESIZED = ("upsample_bilinear2d", "upsample_nearest2d", "upsample_bicubic2d", "_upsample_nearest_exact2d")

_WINDOWS = (
    *_pool("max_pool2d_with_indices", 2, fusion=Fusion.SIMPLE, planes=2),
    *_pool("max_pool3d_with_indices", 3, planes=3),
    *_pool("avg_pool2d", 2, fusion=Fusion.SIMPLE),
    *_pool("avg_pool3d", 3),
    *_pool("_adaptive_avg_pool2d", 2, fusion=Fusion.SIMPLE),
    *_pool("_adaptive_avg_pool3d", 3),
    *_pool("adaptive_max_pool2d", 2, planes=2),
    *_pool("adaptive_max_pool3d", 3, planes=3),
    Operator(name="aten.adaptive_avg_pool2d", fusion=Fusion.SIMPLE),
    Operator(name="aten.fractional_max_pool2d", planes=2),
    Operator(name="aten.fractional_max_pool3d", planes=3),
    *(Operator(name=f"aten.{name}", axes=planes(2)) for name in _RESIZED),
    *(Operator(name=f"aten.{name}_backward", axes=planes(2, sizes=2)) for name in _RESIZED),
    Operator(name="aten.tril", axes=planes(2)),
    Operator(name="aten.triu", axes=planes(2)),
    Operator(name="aten.pixel_shuffle", axes=planes(3)),
    Operator(name="aten.pixel_unshuffle", axes=planes(3)),
    Operator(name="aten.im2col", axes=columns),
    Operator(name="aten.im2col.default", fake=Fake.FIXES_SIZES),
    Operator(name="aten.col2im", axes=columns),
    Operator(name="aten.col2im.default", fake=Fake.FIXES_SIZES),
)

ROWS = (*_REDUCTIONS, *_NORMS, *_LOSSES, *_WINDOWS)
