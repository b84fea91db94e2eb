"""The axes of a node, by its operator's rule.

The rule of an overload goes before that of the operator, and what is not said of x_ is said of x.
"""

from __future__ import annotations

import functools

from lowtide.ir.graph import Node
from lowtide.ir.operators.axes import attention, convolutions, elementwise, layers, lookups, own, products, reductions, views
from lowtide.ir.operators.axes.axis import Axis
from lowtide.ir.operators.axes.builders import Rule
from lowtide.ir.operators.nodes import is_random
from lowtide.ir.operators.table import functional_base

_PARTS = (elementwise, products, convolutions, attention, reductions, layers, lookups, own, views)

RULES: dict[str, Rule] = {name: rule for part in _PARTS for name, rule in part.RULES.items()}


_STRIDED = frozenset(name for part in (elementwise, products, reductions, views) for name in part.RULES)


def reads_any_strides(op: str) -> bool:
    """Whether an operator is known to read tensors however they are laid out: not all kernels look at strides (layer norm's gradient)."""
    return any(name in _STRIDED for name in _names(op))


def axes_of(node: Node) -> tuple[Axis, ...]:
    """Along what a node can be run in parts; () where it cannot, or nobody knows."""
    rule = rule_of(node.op)
    return () if rule is None or node.body is not None or is_random(node) else tuple(rule(node))


@functools.cache
def rule_of(op: str) -> Rule | None:
    """The rule of an operator, "aten.add.Tensor"; None where there is none."""
    return next((RULES[name] for name in _names(op) if name in RULES), None)


def _names(op: str) -> tuple[str, ...]:
    """By what rules may call an operator, the closest first."""
    base = functional_base(op)
    return op, f"{base}.{op.rpartition('.')[2]}", op.rpartition(".")[0], base
