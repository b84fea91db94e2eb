"""Draws that a program repeats under a state of the generator that it has put back, as checkpointing does: copies of what was drawn there.

What follows a state is the same each time, for one kernel with equal inputs in one layout. The CPU's generator alone is followed so.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError
from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.nodes import is_collective, is_random
from lowtide.ir.operators.row import CLONE
from lowtide.ir.operators.table import row_of


def copies(node: Node, drawn: Node, nodes: Iterable[Node]) -> list[Node]:
    """What makes the results of `node` from those of the one that `drawn` was. Raises CaptureError where they are others."""
    pairs = list(zip_longest(node.outputs, drawn.outputs))
    alike = not node.writes and all(old is not None and _layout(new) == _layout(old) for new, old in pairs if new is not None)
    on_cpu = all(value.storage.device == "cpu" for value in drawn.results)
    if node.op != drawn.op or not alike or not on_cpu or not _same_arguments(node, drawn, nodes):
        raise CaptureError(
            f"operator {node.op} at {users_line()} draws random numbers after the program has put back a state of torch's generator, and "
            f"not what {drawn.op} drew there before: seed before the step, or draw once for all. Where checkpointing does so, remove it "
            "(take the plain loss for one that caches): lowtide decides what to recompute; or set the dropout to 0"
        )
    return [Node(CLONE, (old,), (new,), source=node.source) for new, old in pairs if new is not None and old is not None]


def _layout(value: Value | None) -> Any:
    return None if value is None else (value.dtype, value.shape, value.stride, value.storage.device)


def _same_arguments(one: Node, two: Node, nodes: Iterable[Node]) -> bool:
    """Whether two calls are given the same, be it computed twice; of what they write over, the same layout."""
    makers = {value: node for node in nodes for value in node.results}
    unread = row_of(one.op).unread
    waiting: list[tuple[Any, Any]] = [(one.kwargs, two.kwargs)]
    for at, (new, old) in enumerate(zip_longest(one.args, two.args)):
        if at in unread and isinstance(new, Value) and isinstance(old, Value):  # written over
            new, old = _layout(new), _layout(old)
        waiting.append((new, old))
    seen = set[tuple[Value, Value]]()
    while waiting:
        new, old = waiting.pop()
        if new is old:
            continue
        if type(new) is not type(old):
            return False
        if isinstance(new, tuple):
            waiting.extend(zip_longest(new, old))
        elif not isinstance(new, Value):
            if repr(new) != repr(old):
                return False
        elif (new, old) not in seen:
            seen.add((new, old))
            first, second = makers.get(new), makers.get(old)
            if first is None or second is None or first.op != second.op or _layout(new) != _layout(old):
                return False
            if any(each.writes or is_random(each) or is_collective(each) for each in (first, second)):  # may give something else each time
                return False
            if first.results.index(new) != second.results.index(old):
                return False
            waiting.extend(((first.args, second.args), (first.kwargs, second.kwargs)))
    return True
