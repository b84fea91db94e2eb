"""Repeated runs that a sequence can do without: those that may not be, and those whose results nobody reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel
from lowtide.problems.order import Ints
from lowtide.remat.problem import RematProblem


def pruned(problem: RematProblem, sequence: Ints) -> Ints:
    """The sequence without repeated runs that may not be, whose readers find the copy from before, and without those that are not read."""
    kept: Ints = _pruned(sequence, problem.facts)
    return kept


def repeats(sequence: Ints, node_count: int) -> NDArray[np.int64]:
    """The positions of runs that are not their node's first."""
    positions: NDArray[np.int64] = _repeats(sequence, node_count)
    return positions


def prompt(problem: RematProblem, order: Ints, also: Sequence[int] = ()) -> Ints:
    """The order with every run that makes no bytes right after what it waits for: updates free their gradients at once.

    `also`: nodes that go there though they make some.
    """
    base = problem.problem
    position_of = np.full(base.node_count, -1, np.int64)
    position_of[order] = np.arange(len(order))
    moved = base.made_bytes == 0
    moved[list(also)] = True
    position_of[order[moved[order]]] = -1
    ready = _ready(position_of, *base.preds, *base.succs)
    return order[np.lexsort((moved[order], ready[order]))]


@kernel
def _ready(position_of: Any, pred_ptr: Any, _pred_ids: Any, succ_ptr: Any, succ_ids: Any) -> Any:
    """By node its position, or where it has none, the last position of the nodes before it."""
    ready, stack, top = position_of.copy(), np.empty(len(position_of), np.int64), 0
    waits = np.empty(len(position_of), np.int64)
    for node in range(len(position_of)):
        waits[node] = pred_ptr[node + 1] - pred_ptr[node]
        if waits[node] == 0:
            stack[top] = node
            top += 1
    while top > 0:
        top -= 1
        node = stack[top]
        for entry in range(succ_ptr[node], succ_ptr[node + 1]):
            after = succ_ids[entry]
            if position_of[after] < 0:
                ready[after] = max(ready[after], ready[node])
            waits[after] -= 1
            if waits[after] == 0:
                stack[top] = after
                top += 1
    return ready


@kernel
def _pruned(sequence: Any, facts: Any) -> Any:
    allowed, first = np.empty_like(sequence), np.empty(len(sequence), np.bool_)
    count = _allowed(sequence, allowed, first, facts)
    wanted, needed, kept = facts.kept.copy(), 0, np.empty(count, np.bool_)
    for position in range(count - 1, -1, -1):
        kept[position] = is_needed(allowed[position], first[position], wanted, facts)
        needed += kept[position]
    left, at = np.empty(needed, sequence.dtype), 0
    for position in range(count):
        if kept[position]:
            left[at] = allowed[position]
            at += 1
    return left


@kernel(inner=True)
def _allowed(sequence: Any, allowed: Any, first: Any, facts: Any) -> int:
    """Write down the runs that may be, and which of them are their node's first; how many."""
    done, count = np.zeros(len(facts.repeatable), np.bool_), 0
    for position in range(len(sequence)):
        node = sequence[position]
        may = not done[node] or facts.repeatable[node]
        if done[node] and may:
            for entry in range(facts.limit_ptr[node], facts.limit_ptr[node + 1]):
                may = may and not done[facts.limit_ids[entry]]
        if may:
            allowed[count], first[count] = node, not done[node]
            count += 1
        done[node] = True
    return count


@kernel(borrows=True)
def is_needed(node: Any, must: Any, wanted: Any, facts: Any) -> bool:
    """Whether a run must be, or makes what a later one reads. Asked from the last run to the first; `wanted` is what was read so far."""
    needed = must
    for entry in range(facts.made_ptr[node], facts.made_ptr[node + 1]):
        needed = needed or wanted[facts.made_ids[entry]]
    if needed:
        for entry in range(facts.made_ptr[node], facts.made_ptr[node + 1]):
            wanted[facts.made_ids[entry]] = False
        for entry in range(facts.read_ptr[node], facts.read_ptr[node + 1]):
            wanted[facts.read_ids[entry]] = True
    return bool(needed)


@kernel
def _repeats(sequence: Any, node_count: Any) -> Any:
    seen, positions, count = np.zeros(node_count, np.bool_), np.empty(len(sequence), np.int64), 0
    for position in range(len(sequence)):
        if seen[sequence[position]]:
            positions[count] = position
            count += 1
        seen[sequence[position]] = True
    return positions[:count].copy()
