"""How results of parts come to where the whole result lies: straight, by a copy, or added to what other parts have left there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lowtide.ir.graph import Arg, Node, Value
from lowtide.ir.operators.axes.axis import Combine
from lowtide.ir.operators.forms import ADDING, OUT
from lowtide.ir.operators.names import COPY
from lowtide.ir.operators.table import row_of
from lowtide.rewrite.into_sums import ROWS, can_add_rows, rows_of

_MERGING = {
    Combine.SUM: "aten.add_.Tensor", Combine.MEAN: "aten.add_.Tensor", Combine.PRODUCT: "aten.mul_.Tensor",
    Combine.MAX: "aten.maximum.out", Combine.MIN: "aten.minimum.out", Combine.ANY: "aten.logical_or_.default",
    Combine.ALL: "aten.logical_and_.default", Combine.SAME: COPY,
}  # fmt: skip


def copied(value: Value, place: Value) -> Node:
    return _writing(COPY, (place, value), place)


def straight(node: Node, place: Value, over: Sequence[tuple[Value, str]] = ()) -> tuple[Node, ...]:
    """The node that makes its result in its place, by a kernel that gives the same numbers; none where there is none.

    `over` is what lies as the place does and may be read while it is written there, and by which kernels.
    """
    elementwise = next((overload for _, overload in (*node.inplace, *over) if overload.endswith(".out")), None)
    if row_of(node.op).in_memory_of:  # a kernel that looks at no strides: its place may have gaps
        elementwise = None
    op = OUT.get(node.op, elementwise)
    if op is None or len(node.outputs) != 1:
        return ()
    written = _writing(op, node.args, place, (*node.kwargs, ("out", place)), node)
    return (replace(written, inplace=tuple(each for each in over if each[1] == elementwise == op)),)


def merged(value: Value, place: Value, combine: Combine, part: Arg) -> Node:
    """What puts a part's result together with those before it; a mean is weighed by the part's size, and divided in the end."""
    op = _MERGING[combine]
    if op.endswith(".out"):
        return _writing(op, (place, value), place, (("out", place),))
    return _writing(op, (place, value), place, (("alpha", part),) if combine is Combine.MEAN else ())


def adding(node: Node, place: Value, combine: Combine) -> tuple[Node, ...]:
    """The nodes that add its result to what lies there, without making it; none where there are none."""
    if combine is not Combine.SUM:
        return ()
    if node.op == ROWS and can_add_rows(node):
        views = rows_of(node, node.results[0].name)
        args = (place, 0, *(view.outputs[0] for view in views))
        return *views, _writing("aten.index_add_.default", args, place, (), node)
    op = ADDING.get(node.op)
    return () if op is None else (_writing(op, (place, *node.args), place, node.kwargs, node),)


def _writing(op: str, args: tuple[Arg, ...], place: Value, kwargs: tuple[tuple[str, Arg], ...] = (), instead: Node | None = None) -> Node:
    after = replace(place, name=f"{place.name}_v1", version=place.version + 1)
    if instead is not None:
        return replace(instead, op=op, args=args, outputs=(), kwargs=kwargs, writes=((place, after),), inplace=())
    return Node(op, args, (), kwargs, writes=((place, after),))
