"""Between what integers lie: as the operator that makes them says, and as one that reads them and refuses all others does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from lowtide.ir.graph import Arg, Node, Value
from lowtide.ir.sizes import Size, product

Bounds: TypeAlias = "tuple[int, int]"  # the least and the greatest number

HOLDS: dict[str, Bounds] = {
    "bool": (0, 1), "uint8": (0, 2**8 - 1), "int8": (-(2**7), 2**7 - 1), "int16": (-(2**15), 2**15 - 1), "int32": (-(2**31), 2**31 - 1),
}  # fmt: skip
CONVERTS = "aten._to_copy.default"

# Results that are places along a dimension: which result, and which argument says along what, with what it is where left out.
_PLACES: dict[str, tuple[int, int, Arg]] = {
    "aten.max.dim": (1, 1, None), "aten.min.dim": (1, 1, None), "aten.median.dim": (1, 1, None), "aten.nanmedian.dim": (1, 1, None),
    "aten.mode.default": (1, 1, -1), "aten.kthvalue.default": (1, 2, -1), "aten.topk.default": (1, 2, -1),
    "aten.sort.default": (1, 1, -1), "aten.sort.stable": (1, 1, -1), "aten.cummax.default": (1, 1, None),
    "aten.cummin.default": (1, 1, None), "aten.argmax.default": (0, 1, None), "aten.argmin.default": (0, 1, None),
    "aten.argsort.default": (0, 1, -1),
}  # fmt: skip
# Results that are places in a plane: how many dimensions at the end that has.
_PLANES = {
    "aten.max_pool2d_with_indices.default": 2, "aten.max_pool3d_with_indices.default": 3, "aten.adaptive_max_pool2d.default": 2,
    "aten.adaptive_max_pool3d.default": 3, "aten.fractional_max_pool2d.default": 2, "aten.fractional_max_pool3d.default": 3,
}  # fmt: skip


def made_within(node: Node, value: Value) -> Bounds | None:
    """The bounds of an integer result by the operator that makes it; None where that says nothing."""
    given = node.args[0] if node.args else None
    if not isinstance(given, Value):
        return None
    if node.op == CONVERTS:
        return HOLDS.get(given.dtype)
    if node.op in _PLANES:
        return _up_to(product(given.shape[-_PLANES[node.op] :]))
    result, position, default = _PLACES.get(node.op, (None, 0, None))
    if result is None or node.outputs[result] is not value:
        return None
    dimension = dict(node.kwargs).get("dim", node.args[position] if position < len(node.args) else default)
    return _below(given, dimension) if isinstance(dimension, int) else _up_to(product(given.shape))


def refused_beyond(node: Node, value: Value) -> Bounds | None:
    """The bounds outside of which a node that reads integers raises; None where it takes all."""
    return _REFUSES[node.op](node, value) if node.op in _REFUSES else None


def _looked_up(node: Node, value: Value) -> Bounds | None:
    return _below(node.args[0], 0) if node.args[1] is value else None


def _gathered(node: Node, value: Value) -> Bounds | None:
    return _below(node.args[0], node.args[1]) if node.args[2] is value else None


def _labels(node: Node, value: Value) -> Bounds | None:
    """The classes, and the label that says that an element does not count."""
    scores, ignored = node.args[0], node.args[4]
    if node.args[1] is not value or not isinstance(scores, Value) or not isinstance(ignored, int):
        return None
    classes = scores.shape[1 if len(scores.shape) > 1 else 0]
    return (min(0, ignored), max(classes - 1, ignored)) if isinstance(classes, int) else None


_REFUSES: dict[str, Callable[[Node, Value], Bounds | None]] = {
    "aten.embedding.default": _looked_up, "aten.gather.default": _gathered, "aten.index_select.default": _gathered,
    "aten.nll_loss_forward.default": _labels, "aten.nll_loss2d_forward.default": _labels,
}  # fmt: skip


def _below(given: Arg, dimension: Arg) -> Bounds | None:
    """From 0 up to the extent of an argument along a dimension."""
    if not isinstance(given, Value) or not isinstance(dimension, int) or not given.shape:
        return None
    return _up_to(given.shape[dimension])


def _up_to(count: Size) -> Bounds | None:
    return (0, count - 1) if isinstance(count, int) and count > 0 else None
