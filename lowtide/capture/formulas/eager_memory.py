"""What eager's backward pass needs less of memory than what ATen computes under a dispatch mode, of the same bits.

Autograd sums gradients in place. Formulas write the gradient of what reads elements by their places into zeros. And they look at data:
of two branches that a captured program computes, eager computes one.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload

from lowtide.capture.care.turns import during
from lowtide.capture.draft import Draft
from lowtide.ir.graph import Node, Value

_ATEN = torch.ops.aten
_WRITERS: dict[OpOverload, OpOverload] = {
    _ATEN.index_put.default: _ATEN.index_put_.default,
    _ATEN.put.default: _ATEN.put_.default,
    _ATEN.scatter.src: _ATEN.scatter_.src,
    _ATEN.scatter.value: _ATEN.scatter_.value,
    _ATEN.scatter_add.default: _ATEN.scatter_add_.default,
    _ATEN.index_add.default: _ATEN.index_add_.default,
    _ATEN.index_fill.int_Scalar: _ATEN.index_fill_.int_Scalar,
    _ATEN.index_fill.int_Tensor: _ATEN.index_fill_.int_Tensor,
}
_ZEROS = {f"aten.{name}.default" for name in ("zeros", "zeros_like", "new_zeros")}
_CHOICE = "aten.where.self"
_NEAR = 8  # nodes: between a formula's zeros and what it writes there are views and conversions of places

rare_data: ContextVar[bool] = ContextVar("rare", default=False)


def rarely() -> AbstractContextManager[None]:
    """What is computed within, eager computes for rare data alone."""
    return during(rare_data, True)


def of_usual_data(nodes: Sequence[Node], rare: Set[str]) -> tuple[tuple[Node, ...], frozenset[str]]:
    """The nodes without those that make something rare; results that are the one branch that is left.

    All of them where what is rare is read by anything but a choice.
    """
    usual: list[Node] = []
    chosen: set[str] = set()
    for node in nodes:
        if any(value.name in rare for value in node.results):
            continue
        if any(value.name in rare for value in node.inputs):
            if node.op != _CHOICE:  # the gradient of such a branch
                return tuple(nodes), frozenset()
            left = tuple(arg for arg in node.args if not (isinstance(arg, Value) and arg.name in rare))
            node = replace(node, args=left, inplace=tuple(each for each in node.inplace if each[0] in left))
            chosen.update(value.name for value in node.results)
        usual.append(node)
    return tuple(usual), frozenset(chosen)


def form_of(func: OpOverload, args: tuple[Any, ...], draft: Draft) -> OpOverload | None:
    """The operator by which eager writes into zeros that the formula of a gradient has just made; None elsewhere."""
    writer = _WRITERS.get(func)
    if writer is None or torch.is_grad_enabled():
        return None
    formula = torch._C._current_autograd_node()
    if formula is None or isinstance(formula, torch.autograd.function.BackwardCFunction):  # the program's own writes as it says
        return None
    target = draft.value(args[0])
    return writer if any(target in node.results and node.op in _ZEROS for node in draft.nodes[-_NEAR:]) else None


class GradientSums:
    """Tells autograd's own additions, of what arrives at a node from several others, from those of a formula.

    Both come while the node is the current one whose gradient was made last. A formula reads what it adds to, or has made it; autograd
    takes what another formula has made, and adds what this one has. It does so in place, but for a view, whose base holds the storage,
    too: the gradient of a Linear's weight is one, so that a sum for a tied weight takes new memory.
    """

    def __init__(self) -> None:
        self._formula = -1  # the number of the node whose formula runs
        self._since = 0  # how many nodes were recorded before it

    def note(self, recorded: int) -> None:
        """A node is to be recorded behind so many others."""
        node = torch._C._current_autograd_node()
        formula = -1 if node is None else node._sequence_nr()
        if formula != self._formula:
            self._formula, self._since = formula, recorded

    def has(self, node: Node, nodes: Sequence[Node], tensor: Any) -> bool:
        """Whether `node`, behind `nodes`, is such an addition; `tensor` is what it adds to."""
        if node.op != "aten.add.Tensor" or self._formula < 0 or torch.is_grad_enabled() or tensor._is_view():
            return False
        formula, (before, now) = nodes[self._since :], node.args[:2]
        results = {value for each in formula for value in each.results}
        return now in results and before not in results and all(before not in each.inputs for each in formula)
