"""What gets memory, copies it or fills it, by a tensor that it is to be like or by sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lowtide.ir.graph import Node
from lowtide.ir.operators.axes.axis import Axis
from lowtide.ir.operators.axes.builders import axis
from lowtide.ir.operators.elementwise import pointwise
from lowtide.ir.operators.row import AxesRule, Fake, Fusion, Operator


def filled(sizes_at: int) -> AxesRule:
    """A tensor of sizes that are given, the same everywhere."""

    def rule(node: Node) -> Iterator[Axis]:
        made = node.outputs[0]
        for dim in range(len(made.shape) if made is not None else 0):
            yield from axis(node, {}, {0: dim}, [(sizes_at, dim)])

    return rule


def strided(node: Node) -> Iterator[Axis]:
    """x, sizes, strides: the outermost dimension in memory, as strides stay what they are."""
    made = node.outputs[0]
    if made is None or not all(isinstance(step, int) for step in made.stride):
        return
    dims = [dim for dim, extent in enumerate(made.shape) if extent != 1]
    if dims:
        dim = max(dims, key=lambda each: made.stride[each])
        yield from axis(node, {}, {0: dim}, [(1, dim)])


_GENERATED: dict[str, Any] = {"fusion": Fusion.SIMPLE, "fusible": True}

_LIKE = (
    *pointwise("clone _to_copy", **_GENERATED),
    *pointwise("alias detach", view=True, **_GENERATED),
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

ROWS = (*_LIKE, *_OF_SIZES)
