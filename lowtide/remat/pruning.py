"""Repeated runs that a sequence can do without: those that may not be, and those whose results nobody reads."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel
from lowtide.problems.order import Ints
from lowtide.remat.problem import RematProblem

Mask = NDArray[np.bool_]


def pruned(problem: RematProblem, sequence: Ints) -> Ints:
    """The sequence without repeated runs that may not be, whose readers find the copy from before, and without those that are not read."""
    allowed = sequence[_allowed(sequence, problem.repeatable, *problem.limits)]
    first = np.zeros(len(allowed), np.bool_)
    first[np.unique(allowed, return_index=True)[1]] = True
    return allowed[needed(problem, allowed, first)]


def needed(problem: RematProblem, sequence: Ints, must: Mask) -> Mask:
    """[runs] those that must be, and those that make what such a run reads, directly or not."""
    base = problem.problem
    found: Mask = _needed(sequence, must, *base.reads, *base.outputs_of, base.kept)
    return found


def prompt(problem: RematProblem, order: Ints) -> Ints:
    """The order with every run that makes no bytes right after what it waits for: updates free their gradients at once."""
    base = problem.problem
    position_of = np.full(base.node_count, -1, np.int64)
    position_of[order] = np.arange(len(order))
    position_of[order[base.made_bytes[order] == 0]] = -1
    ready = _ready(position_of, *base.preds, *base.succs)
    return order[np.lexsort((base.made_bytes[order] == 0, ready[order]))]


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
def _allowed(sequence: Any, repeatable: Any, limit_ptr: Any, limit_ids: Any) -> Mask:
    done, allowed = np.zeros(len(repeatable), np.bool_), np.ones(len(sequence), np.bool_)
    for position in range(len(sequence)):
        node = sequence[position]
        if done[node]:
            allowed[position] = repeatable[node]
            for entry in range(limit_ptr[node], limit_ptr[node + 1]):
                allowed[position] &= not done[limit_ids[entry]]
        done[node] = True
    return allowed


@kernel
def _needed(sequence: Any, must: Any, read_ptr: Any, read_ids: Any, made_ptr: Any, made_ids: Any, kept: Any) -> Mask:
    wanted = kept.copy()
    found: Mask = must.copy()
    for position in range(len(sequence) - 1, -1, -1):
        node = sequence[position]
        for entry in range(made_ptr[node], made_ptr[node + 1]):
            found[position] |= wanted[made_ids[entry]]
        if not found[position]:
            continue
        for entry in range(made_ptr[node], made_ptr[node + 1]):
            wanted[made_ids[entry]] = False
        for entry in range(read_ptr[node], read_ptr[node + 1]):
            wanted[read_ids[entry]] = True
    return found
