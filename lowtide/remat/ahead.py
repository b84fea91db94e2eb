"""State that lies on the host between steps: its loads begun ahead of who reads them, what is copied back waited for late.

Such loads and waits are nodes of the graph, which runs them once. An order of least memory has a load right before the first node that
reads it, and a wait right behind the copy that it waits for, where the device would stand still for as long as the copy takes. Moved
apart they run beside what stands between, as far as there is room: no step comes to more bytes than is said, and no more than a window of
bytes is there early, or late. Loads stay in the order in which they are wanted, waits in that in which copies end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lowtide.base.kernels import kernel
from lowtide.problems.order import Ints
from lowtide.remat.cost import cost_of
from lowtide.remat.entries import Lane
from lowtide.remat.problem import RematProblem

_WINDOWS = (64, 16, 4)  # of all that is loaded or copied back: one in so many parts
LOAD, DROP = int(Lane.LOAD), int(Lane.DROP)  # for kernels
_LEAST = 2  # tensors that a window has room for


def ahead_of_all(problem: RematProblem, sequence: Ints, most_bytes: int | None = None) -> Iterator[Ints]:
    """The sequence with copies ahead and late, by window, at no higher peak, or at `most_bytes`; nothing where it has no such copies."""
    if problem.copies is None:
        return
    loaded = problem.problem.made_bytes[problem.lanes == Lane.LOAD]
    dropped = np.flatnonzero(problem.lanes == Lane.DROP)
    waited = problem.problem.tensor_bytes[problem.problem.reads.ids[problem.problem.reads.ptr[dropped]]]
    copied = max(loaded, waited, key=lambda each: int(each.sum()))
    cost = cost_of(problem, sequence)
    least, seen = _LEAST * int(copied.max(initial=0)), set[bytes]()
    for window in dict.fromkeys(max(least, int(copied.sum()) // parts) for parts in _WINDOWS):
        most = cost.peak_bytes if most_bytes is None else most_bytes
        ahead: Ints = _ahead(sequence, cost.footprint_bytes, most, window, problem.facts)
        if ahead.tobytes() not in seen and cost_of(problem, ahead).peak_bytes <= most:
            seen.add(ahead.tobytes())
            yield ahead


@kernel
def _ahead(sequence: Any, footprint_bytes: Any, most_bytes: Any, window_bytes: Any, facts: Any) -> Any:
    """Loads first, from the first on, then waits, from the last on. Where each goes is a key; of equal ones the order stays."""
    count, n = len(sequence), len(facts.lane)
    level, early, late = footprint_bytes.copy(), np.zeros(count, np.int64), np.zeros(count, np.int64)
    key = 2 * np.arange(count)  # even: where it stands; odd: right behind the entry before
    latest = 0
    for position in range(count):
        code = sequence[position]
        if code >= n or facts.lane[code] != LOAD:
            continue
        nbytes, at = facts.made_bytes[code], position
        while at > latest and level[at - 1] + nbytes <= most_bytes and early[at - 1] + nbytes <= window_bytes:
            at -= 1
            level[at] += nbytes
            early[at] += nbytes
        key[position] = 2 * at - 1 if at < position else 2 * position
        latest = at
    last_read, earliest = np.full(len(facts.tensor_bytes), -1), count
    for position in range(count):
        code = sequence[position]
        if code < n:
            for entry in range(facts.read_ptr[code], facts.read_ptr[code + 1]):
                last_read[facts.read_ids[entry]] = position
    for position in range(count - 1, -1, -1):
        code = sequence[position]
        if code >= n or facts.lane[code] != DROP:
            continue
        tensor = facts.read_ids[facts.read_ptr[code]]
        nbytes, last = facts.tensor_bytes[tensor], last_read[tensor]
        at = position
        while at + 1 < earliest:
            if at + 1 > last:
                if level[at + 1] + nbytes > most_bytes or late[at + 1] + nbytes > window_bytes:
                    break
                level[at + 1] += nbytes
                late[at + 1] += nbytes
            at += 1
        key[position] = 2 * at + 1 if at > position else 2 * position
        earliest = at + 1
    return sequence[np.argsort(key, kind="mergesort")]
