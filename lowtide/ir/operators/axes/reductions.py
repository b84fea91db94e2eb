"""Rules of what takes many elements together: sums, means, extrema; by the dimensions that an argument names."""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.base.narrow import of_kind
from lowtide.ir.graph import Node
from lowtide.ir.operators.axes.axis import Axis, Combine, Reduced, Role
from lowtide.ir.operators.axes.builders import MEAN, SUM, NodeLocation, Rule, axis, dims_of, given, number


def over(combine: Reduced | None, dims_at: int | None = 1, keepdim_at: int = 2) -> Rule:
    """Named dimensions are reduced, by `combine`, or closed where there is none; all others map. `dims_at` None: all are reduced."""

    def rule(node: Node) -> Iterator[Axis]:
        value = given(node, (0,))
        if value is None:
            return
        rank = len(value.shape)
        reduced = tuple(range(rank)) if dims_at is None else dims_of(node, dims_at, rank)
        keeps = dims_at is not None and number(node, keepdim_at, "keepdim", 0) is True
        for dim in range(rank):
            if dim not in reduced:
                to = dim if keeps else dim - sum(each < dim for each in reduced)
                yield from axis(node, {0: dim}, dict.fromkeys(range(len(node.outputs)), to))
            elif combine is not None:
                made: dict[int, Role] = {0: combine}
                yield from axis(node, {0: dim}, made)

    return rule


def named(position: int, *, default: int = -1) -> Rule:
    """All dimensions of all tensors but the one that an argument names: softmax, cumsum, sort, topk, where shapes agree on it."""

    def rule(node: Node) -> Iterator[Axis]:
        value = given(node, (0,))
        if value is None:
            return
        rank = len(value.shape)
        dim_of = number(node, position, "dim", default)
        dim_of = of_kind(int, dim_of)
        for dim in range(rank):
            if dim != dim_of % rank:
                tensors = [at for at in range(len(node.args)) if (one := given(node, (at,))) is not None and len(one.shape) == rank]
                positions: NodeLocation = dict.fromkeys(tensors, dim)
                yield from axis(node, positions, dict.fromkeys(range(len(node.outputs)), dim))

    return rule


_MOST, _LEAST = Reduced(Combine.MAX), Reduced(Combine.MIN)

RULES: dict[str, Rule] = {
    "aten.sum": over(SUM),
    "aten.sum.default": over(SUM, None),
    "aten.mean": over(MEAN),
    "aten.mean.default": over(MEAN, None),
    "aten.amax": over(_MOST),
    "aten.amin": over(_LEAST),
    "aten.max.default": over(_MOST, None),
    "aten.min.default": over(_LEAST, None),
    "aten.max.dim": over(None),
    "aten.min.dim": over(None),
    "aten.prod.default": over(Reduced(Combine.PRODUCT), None),
    "aten.prod.dim_int": over(Reduced(Combine.PRODUCT)),
    "aten.any": over(Reduced(Combine.ANY)),
    "aten.any.default": over(Reduced(Combine.ANY), None),
    "aten.all": over(Reduced(Combine.ALL)),
    "aten.all.default": over(Reduced(Combine.ALL), None),
    "aten.argmax": over(None),
    "aten.argmin": over(None),
    "aten.logsumexp": over(None),
    "aten.std.correction": over(None, keepdim_at=9),
    "aten.var.correction": over(None, keepdim_at=9),
    "aten.var_mean.correction": over(None, keepdim_at=9),
    "aten.linalg_vector_norm": over(None, dims_at=2, keepdim_at=3),
    "aten.norm.ScalarOpt_dim": over(None, dims_at=2, keepdim_at=3),
    "aten.norm.ScalarOpt_dim_dtype": over(None, dims_at=2, keepdim_at=3),
    "aten._softmax": named(1),
    "aten._log_softmax": named(1),
    "aten._safe_softmax": named(1),
    "aten._softmax_backward_data": named(2),
    "aten._log_softmax_backward_data": named(2),
    "aten.cumsum": named(1),
    "aten.cumprod": named(1),
    "aten.logcumsumexp": named(1),
    "aten.cummax": named(1),
    "aten.cummin": named(1),
    "aten.sort": named(1),
    "aten.sort.stable": named(2),
    "aten.argsort": named(1),
    "aten.topk": named(2),
    "aten.glu": named(1),
    "aten.glu_backward": named(2),
}
