"""What takes many elements together: sums, means, extrema, softmax, sorting; by the dimensions that an argument names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lowtide.errors import of_kind
from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.axes import MEAN, SUM, Axis, Combine, DimsByArgument, Reduced, Role, axis, dims_of, given, number
from lowtide.ir.operators.row import AxesRule, Fusion, Indices, Operator


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

ROWS = (*_SUMS, *_ALONG)
