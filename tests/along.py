"""From one dimension of one tensor to a split: the axes along which the nodes around are cut with it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.axes.axis import Axis, cut_by
from lowtide.ir.operators.axes.table import axes_of
from lowtide.ir.operators.nodes import is_view
from lowtide.rewrite.fission.roles import Split, refuse


def along(nodes: Sequence[Node], value: Value, dim: int) -> Split:
    """The split of all these nodes, in program order, along the dimension that runs through `value` at `dim`.

    Raises CheckError naming a node that the dimension does not run through.
    """
    touching: defaultdict[Value, list[Node]] = defaultdict(list)
    for node in nodes:
        for each in dict.fromkeys((*node.inputs, *node.results, *(before for before, _ in node.writes))):
            touching[each].append(node)
    dims, chosen, pending = {value: dim}, dict[Node, Axis](), [value]
    while pending:
        reached = pending.pop()
        for node in touching[reached]:
            if node not in chosen and (axis := _axis(node, reached, dims[reached])) is not None:
                chosen[node] = axis
                for other, at in cut_by(node, axis):
                    if other not in dims:
                        dims[other] = at
                        pending.append(other)
    for node in nodes:
        if node not in chosen and not is_view(node):
            refuse(node, f"the dimension {dim} of {value.name} to run through it")
    return Split({node: chosen.get(node) for node in nodes})


def _axis(node: Node, value: Value, dim: int) -> Axis | None:
    """The axis of a node that has a value's dimension."""
    return next((axis for axis in axes_of(node) if (value, dim) in set(cut_by(node, axis))), None)
