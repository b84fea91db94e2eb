"""Element-wise operators that compute where the scatter after them writes, as the user's program did.

t = aten.add.Tensor(v, y)            # v lies in b
c = as_strided_scatter(b, t, ...)    # where v lies, in the memory of b
w = aten.as_strided(c, ...)          # as v lies

w = aten.add_.Tensor(v, y)           # the same bits: what is read lies as it did, so the kernel goes through it as it did
c = b
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from lowtide.cost.operators import operator
from lowtide.ir.graph import Node, Storage, Value
from lowtide.ir.operators.nodes import is_random
from lowtide.ir.operators.row import AS_STRIDED, SCATTER
from lowtide.ir.sizes import contiguous_stride
from lowtide.lower.statements import VariableNames, call, comment, renamed
from lowtide.plan.contents import Decision

Dying = list[list[tuple[Storage, list[Value]]]]


class Writes(NamedTuple):
    """By position in the order, what becomes of nodes that write in place."""

    calls: Mapping[int, tuple[str, Value | None]]  # the operator that works in place, and the value that its result is, if any
    scatters: Collection[int]  # of which nothing is left but another name
    views: Collection[int]  # of which nothing is left

    @classmethod
    def of(cls, plan: Decision, dying: Dying) -> Writes:
        """Takes out of `dying` what is not made any more."""
        nodes = [plan.graph.nodes[index] for index in plan.order]
        calls, scatters, views = dict[int, tuple[str, Value | None]](), set[int](), set[int]()
        for at, (node, scatter) in enumerate(pairwise(nodes), 1):
            overload = _overload(node, scatter) if scatter.op == SCATTER and plan.reuses[plan.order[at]] >= 0 else None
            dead = next((entry for entry in dying[at] if entry[1] == [*node.outputs]), None)
            if overload is not None and dead is not None:
                dying[at].remove(dead)
                view = _view(scatter, nodes[at + 1]) if at + 1 < len(nodes) else None
                calls[at - 1] = overload, view
                scatters.add(at)
                views |= set() if view is None else {at + 1}
        return cls(calls, scatters, views)

    def lines(self, position: int, node: Node, names: VariableNames) -> list[str] | None:
        """What is left of a node; None where all of it is."""
        if position in self.views:
            return []
        if position in self.scatters:
            return [renamed(node, names)]
        if position not in self.calls:
            return None
        overload, view = self.calls[position]
        text = call(overload, node.args, node.kwargs, names)
        return [f"{text}{comment(node)}" if view is None else f"{names[view]} = {text}{comment(node)}"]


def _overload(node: Node, scatter: Node) -> str | None:
    """The operator that computes a node in place, where its first argument lies just where the scatter writes what it makes."""
    base, update, *where = scatter.args
    if node.writes or node.body is not None or is_random(node) or node.outputs != (update,) or not node.op.startswith("aten."):
        return None
    first, result = node.args[0] if node.args else None, node.outputs[0]
    if not (isinstance(base, Value) and isinstance(first, Value) and result is not None and first.storage is base.storage):
        return None
    same = [first.dtype, first.shape, *where] == [base.dtype, result.shape, *_geometry(first)] and result.dtype == base.dtype
    if not same or base.dtype.startswith("complex"):  # a complex division in place takes another loop, and gives other bits
        return None
    others = [value for value in node.inputs if value.storage is base.storage and _geometry(value) != _geometry(first)]
    return _in_place(node.op) if all(_is_apart(value, first, base) for value in others) else None


def _geometry(value: Value) -> list[Any]:
    return [value.shape, value.stride, value.offset]


def _view(scatter: Node, after: Node) -> Value | None:
    """The view that the node after a scatter makes of what was written, if it does."""
    return after.outputs[0] if after.op == AS_STRIDED and after.args == (scatter.outputs[0], *scatter.args[2:5]) else None


@functools.cache
def _in_place(op: str) -> str | None:
    """ "aten.add_.Tensor" for "aten.add.Tensor", where that is element-wise and takes the same arguments."""
    form, (namespace, base, overload) = operator(op), op.split(".")
    written = getattr(getattr(getattr(torch.ops, namespace), f"{base}_", None), overload, None)
    if written is None or torch.Tag.pointwise not in form.tags or len(form._schema.returns) != 1 or form._schema.is_mutable:
        return None
    mine, its = ([(a.name, str(a.type)) for a in each._schema.arguments] for each in (form, written))
    return f"{namespace}.{base}_.{overload}" if mine == its else None


def _is_apart(value: Value, first: Value, base: Value) -> bool:
    """Whether two views of a dense tensor share no element, as they are blocks of it with no index in common along some dimension."""
    steps = contiguous_stride(base.shape)
    blocks = [_block(view, base, steps) for view in (value, first)]
    if base.stride != steps or not all(blocks):
        return False
    return any(start >= other + more or other >= start + extent for (start, extent), (other, more) in zip(*blocks, strict=True))


def _block(view: Value, base: Value, steps: Sequence[Any]) -> list[tuple[int, int]]:
    """Where a view begins and how far it goes along each dimension of its base; empty where it is no block, or sizes are no numbers."""
    if not all(isinstance(size, int) for size in (*view.shape, *view.stride, *base.shape, view.offset, base.offset)):
        return []
    left, block = view.offset - base.offset, []
    extents = {step: size for step, size in zip(view.stride, view.shape, strict=True) if size > 1}
    for step, whole in zip(steps, base.shape, strict=True):
        start, extent = left // step, extents.get(step, 1)
        left -= start * step
        block.append((start, extent))
        if start + extent > whole:
            return []
    return block if sum(size > 1 for size in view.shape) == sum(extent > 1 for _, extent in block) else []
