"""Repeated runs that a sequence can do without: those that may not be, and those whose results nobody reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel
from lowtide.problems.order import Ints
from lowtide.remat.entries import Lane
from lowtide.remat.problem import RematProblem


def pruned(problem: RematProblem, sequence: Ints) -> Ints:
    """The sequence without repeated runs that may not be, whose readers find the copy from before, and without those that are not read."""
    kept: Ints = _pruned(sequence, problem.facts)
    return kept


def repeats(sequence: Ints, node_count: int) -> NDArray[np.int64]:
    """The positions of runs that are not their node's first."""
    first, positions = np.empty(node_count, np.int64), np.arange(len(sequence))
    first[sequence[::-1]] = positions[::-1]  # of equals the last that is written stays
    again: NDArray[np.int64] = positions[first[sequence] != positions]
    return again


def prompt(problem: RematProblem, order: Ints, also: Sequence[int] = ()) -> Ints:
    """The order with every run that makes no bytes right after what it waits for: updates free their gradients at once.

    `also`: nodes that go there though they make some.
    """
    base = problem.problem
    position_of = np.full(base.node_count, -1, np.int64)
    position_of[order] = np.arange(len(order))
    moved = base.made_bytes == 0
    moved[list(also)] = True
    moved |= _from_loads(problem)
    position_of[order[moved[order]]] = -1
    ready = position_of.copy()
    for node in np.flatnonzero(position_of < 0):  # nodes are numbered as they may run
        ready[node] = ready[base.preds.ids[base.preds.ptr[node] : base.preds.ptr[node + 1]]].max(initial=-1)
    return patient(problem, order[np.lexsort((moved[order], ready[order]))])


def _from_loads(problem: RematProblem) -> NDArray[np.bool_]:
    """[n] what loads state that lies on the host between steps, which `patient` puts where it is wanted, and what is made of that."""
    base = problem.problem
    follows: NDArray[np.bool_] = problem.lanes == Lane.LOAD
    for node in range(base.node_count) if follows.any() else ():  # nodes are numbered as they may run
        follows[node] |= follows[base.preds.ids[base.preds.ptr[node] : base.preds.ptr[node + 1]]].any()
    return follows


def patient(problem: RematProblem, order: Ints) -> Ints:
    """The order with every run that neither makes nor reads bytes right before the first that waits for it.

    A weight's decay would else run before its gradient exists, and what reads that weight could not be repeated any more. What lies on the
    host between steps is loaded for such a run, and so it is for a decay of that.
    """
    base = problem.problem
    when = np.full(base.node_count, base.node_count, np.int64)
    when[order] = np.arange(len(order))
    loads = problem.lanes == Lane.LOAD
    sizes = np.where((base.producer >= 0) & loads[base.producer], 0, base.tensor_bytes)  # loaded for the node that waits
    read_bytes = np.concatenate([[0], np.cumsum(sizes[base.reads.ids], dtype=np.int64)])[base.reads.ptr]
    waits = ((base.made_bytes == 0) | loads) & (np.diff(read_bytes) == 0) & (np.diff(base.succs.ptr) > 0)
    for node in np.flatnonzero(waits | (when == base.node_count))[::-1]:
        when[node] = when[base.succs.ids[base.succs.ptr[node] : base.succs.ptr[node + 1]]].min(initial=base.node_count)
    return order[np.lexsort((np.arange(len(order)), ~waits[order], when[order]))]


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


@kernel(inner=True, borrows=True)
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
