"""Rules of norms, of losses, and of what looks around within a plane: pools and interpolation."""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.ir.graph import Node
from lowtide.ir.operators.axes.axis import Axis, Combine, Reduced, Role
from lowtide.ir.operators.axes.builders import MEAN, SAME, SUM, NodeLocation, Rule, axis, given, number

_NONE, _MEAN, _SUM = 0, 1, 2  # torch's reductions of losses


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
    value = given(node, (0,))
    if value is None:
        return
    training = node.args[5] is not False
    kept: Role = 0 if training else SAME  # what is saved of a norm that takes no statistics is empty
    yield from axis(node, {0: 1, 1: 0, 2: 0, 3: 0, 4: 0}, {0: 1, 1: kept, 2: kept})
    if not training:
        for dim in (0, *range(2, len(value.shape))):
            yield from axis(node, {0: dim}, {0: dim, 1: SAME, 2: SAME})


def batch_norm_backward(node: Node) -> Iterator[Axis]:
    """gradient, x, weight, running mean and variance, saved mean and invstd, training."""
    value = given(node, (1,))
    if value is None:
        return
    training = node.args[7] is not False
    saved: NodeLocation = {5: 0, 6: 0} if training else {}
    yield from axis(node, {0: 1, 1: 1, 2: 0, 3: 0, 4: 0, **saved}, {0: 1, 1: 0, 2: 0})
    if not training:
        for dim in (0, *range(2, len(value.shape))):
            yield from axis(node, {0: dim, 1: dim}, {0: dim, 1: SUM, 2: SUM})


def likelihood(node: Node) -> Iterator[Axis]:
    """scores[n, c, ..], target[n, ..], weight, reduction -> loss, total weight. A mean is a sum over the sum of weights, at the end."""
    scores = given(node, (0,))
    if scores is None or len(scores.shape) < 2:
        return
    reduction, total = number(node, 3, "reduction", _MEAN), node.outputs[1]
    for dim in (0, *range(2, len(scores.shape))):
        sliced: NodeLocation = {0: dim, 1: dim - (dim > 0)}
        if reduction == _NONE:
            yield from axis(node, sliced, {0: sliced[1], 1: SAME})
        elif reduction == _SUM:
            yield from axis(node, sliced, {0: SUM, 1: SUM})
        elif total is not None and len(node.args) > 3:
            yield from axis(node, sliced, {0: Reduced(Combine.SUM, over=1), 1: SUM}, instead={(3,): _SUM})


def likelihood_backward(node: Node) -> Iterator[Axis]:
    """gradient, scores[n, c, ..], target[n, ..], weight, reduction, ignored, total weight: that of the whole."""
    scores = given(node, (1,))
    if scores is None or len(scores.shape) < 2:
        return
    for dim in (0, *range(2, len(scores.shape))):
        target = dim - (dim > 0)
        by_element: NodeLocation = {0: target} if node.args[4] == _NONE else {}
        yield from axis(node, {1: dim, 2: target, **by_element}, {0: dim})


def mean_square(node: Node) -> Iterator[Axis]:
    """x, target, reduction."""
    one, two = given(node, (0,)), given(node, (1,))
    if one is None or two is None or one.shape != two.shape:
        return
    reduction = number(node, 2, "reduction", _MEAN)
    for dim in range(len(one.shape)):
        role: Role = dim if reduction == _NONE else MEAN if reduction == _MEAN else SUM
        yield from axis(node, {0: dim, 1: dim}, {0: role})


def mean_square_backward(node: Node) -> Iterator[Axis]:
    """gradient, x, target, reduction; the gradient of a mean divides by the count of what it is given, so it is closed."""
    one, two = given(node, (1,)), given(node, (2,))
    if one is None or two is None or one.shape != two.shape or node.args[3] == _MEAN:
        return
    for dim in range(len(one.shape)):
        by_element: NodeLocation = {0: dim} if node.args[3] == _NONE else {}
        yield from axis(node, {1: dim, 2: dim, **by_element}, {0: dim})


def planes(dims: int, sizes: int | None = None) -> Rule:
    """All but the last dimensions, in every tensor: what looks around in a plane, or in the last two dimensions of a matrix."""

    def rule(node: Node) -> Iterator[Axis]:
        tensors = [at for at in range(len(node.args)) if given(node, (at,)) is not None]
        value = given(node, (tensors[0],)) if tensors else None
        for dim in range(len(value.shape) - dims if value is not None else 0):
            sliced: NodeLocation = dict.fromkeys(tensors, dim)
            yield from axis(node, sliced, dict.fromkeys(range(len(node.outputs)), dim), () if sizes is None else [(sizes, dim)])

    return rule


def columns(node: Node) -> Iterator[Axis]:
    """Windows as columns, and back: [n, c, ..] and [n, c * window, positions], or without n."""
    value = given(node, (0,))
    made = node.outputs[0]
    if value is not None and made is not None:
        for dim in range(min(len(value.shape), len(made.shape)) - 1):
            yield from axis(node, {0: dim}, {0: dim})


_POOLS = (
    "max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
    "adaptive_max_pool2d", "adaptive_max_pool3d",
)  # fmt: skip
_RESIZED = ("upsample_bilinear2d", "upsample_nearest2d", "upsample_bicubic2d", "_upsample_nearest_exact2d")

RULES: dict[str, Rule] = {
    "aten.native_layer_norm": layer_norm,
    "aten.native_layer_norm_backward": layer_norm_backward,
    "aten.native_group_norm": group_norm,
    "aten.native_group_norm_backward": group_norm_backward,
    "aten.native_batch_norm": batch_norm,
    "aten.native_batch_norm_backward": batch_norm_backward,
    **dict.fromkeys(("aten.nll_loss_forward", "aten.nll_loss2d_forward"), likelihood),
    **dict.fromkeys(("aten.nll_loss_backward", "aten.nll_loss2d_backward", "lowtide.cross_entropy_backward"), likelihood_backward),
    "aten.mse_loss": mean_square,
    "aten.mse_loss_backward": mean_square_backward,
    **{f"aten.{name}": planes(3 if "3d" in name else 2) for name in _POOLS},
    **{f"aten.{name}_backward": planes(3 if "3d" in name else 2) for name in _POOLS},
    **{f"aten.{name}": planes(2) for name in _RESIZED},
    **{f"aten.{name}_backward": planes(2, sizes=2) for name in _RESIZED},
    "aten.tril": planes(2),
    "aten.triu": planes(2),
    "aten.pixel_shuffle": planes(3),
    "aten.pixel_unshuffle": planes(3),
    "aten.im2col": columns,
    "aten.col2im": columns,
}
