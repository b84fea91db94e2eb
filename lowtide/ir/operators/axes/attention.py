"""Rules of attention: batch, heads, and queries, where no mask is implied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lowtide.ir.graph import Arg, Node, Value
from lowtide.ir.operators.axes.axis import Axis, Role
from lowtide.ir.operators.axes.builders import SUM, Rule, axis


def attention(node: Node) -> Iterator[Axis]:
    """query[b, h, q, e], key[b, h, k, e], value, dropout, causal -> result[b, h, q, e], logarithms[b, h, q]."""
    for dim in (0, 1):
        yield from axis(node, {0: dim, 1: dim, 2: dim, **_mask(node, dim)}, {0: dim, 1: dim})
    if node.args[4:5] in ((), (False,)):
        yield from axis(node, {0: 2, **_mask(node, 2)}, {0: 2, 1: 2})


def attention_backward(node: Node) -> Iterator[Axis]:
    """gradient, query, key, value, result, logarithms, dropout, causal -> gradients of query, key, value."""
    for dim in (0, 1):
        yield from axis(node, {**dict.fromkeys(range(6), dim), **_mask(node, dim)}, {0: dim, 1: dim, 2: dim})
    if node.args[7] is False:
        made: dict[int, Role] = {0: 2, 1: SUM, 2: SUM}
        yield from axis(node, {0: 2, 1: 2, 4: 2, 5: 2, **_mask(node, 2)}, made)


def _mask(node: Node, dim: int) -> dict[Any, int]:
    """Where a mask, [b, h, q, k] or [q, k], is cut along with a dimension."""
    mask: Arg = dict(node.kwargs).get("attn_mask")
    at = dim - 4
    return {("attn_mask",): at} if isinstance(mask, Value) and len(mask.shape) >= -at and mask.shape[at] != 1 else {}


RULES: dict[str, Rule] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
}
