"""A proven lower bound on the time of any sequence within a limit: what every order of the nodes has to do again.

Take any node. When it runs for the first time, all that it follows from has run, and nothing that follows from it has. So whatever was made
before it and is read after it is there at that moment, or its maker runs once more. What is there fits beside what the node itself needs:
a knapsack of bytes against time, whose relaxation, filled with what takes longest for its bytes, no sequence beats. The best bound of all
nodes holds. It is exact where one such moment decides, and says nothing of tensors that are copied to a host.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lowtide.problems.order import OrderProblem
from lowtide.remat.problem import RematProblem


def time_bound_us(problem: RematProblem, limit_bytes: int) -> float:
    """Microseconds that every sequence takes at least whose peak is no more than the limit, what is resident included.

    Infinite where there is none: what a moment has to hold and cannot make again is too much. Where tensors may be swapped, those are taken
    to cost nothing. Time and memory are quadratic in nodes, by bits.
    """
    base = problem.problem
    again = _again_us(problem)
    extra_us = max((_missing_us(problem, node, alive, again, limit_bytes) for node, alive in _moments(base)), default=0.0)
    return float(problem.cost_us[~problem.is_view].sum()) + extra_us


def _again_us(problem: RematProblem) -> NDArray[np.float64]:
    """[m] what it takes to have a tensor again: a run of its maker, a share of that where it makes several; infinite where nobody can."""
    base = problem.problem
    made = np.maximum(1, np.diff(base.outputs_of.ptr))
    found = np.full(base.tensor_count, np.inf)
    makers = base.producer[base.producer >= 0]
    share = np.where(problem.repeatable, problem.cost_us / made, np.inf)
    found[base.producer >= 0] = share[makers]
    if problem.links is not None:
        found[problem.links.storable] = 0.0
    return found


def _moments(base: OrderProblem) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """Each node, and [m] what was made before it in every order and is read after it."""
    before, after = _closed(base.preds.ptr, base.preds.ids), _closed(base.succs.ptr, base.succs.ids)
    readers = [set(base.readers.ids[base.readers.ptr[t] : base.readers.ptr[t + 1]].tolist()) for t in range(base.tensor_count)]
    bits = [sum(1 << reader for reader in each) for each in readers]
    for node in range(base.node_count):
        alive = np.zeros(base.tensor_count, np.bool_)
        for tensor in range(base.tensor_count):
            maker = int(base.producer[tensor])
            alive[tensor] = (maker < 0 or bool(before[node] >> maker & 1)) and bool(bits[tensor] & after[node])
        yield node, alive


def _closed(ptr: NDArray[np.int32], ids: NDArray[np.int32]) -> list[int]:
    """By node all that come before it, directly or not, as bits; rows are of those that come right before."""
    found: dict[int, int] = {}
    for start in range(len(ptr) - 1):
        stack = [start]
        while stack:
            node = stack[-1]
            rest = [other for other in ids[ptr[node] : ptr[node + 1]].tolist() if other not in found]
            if rest:
                stack += rest
                continue
            stack.pop()
            bits = 0
            for other in ids[ptr[node] : ptr[node + 1]].tolist():
                bits |= found[other] | 1 << other
            found[node] = bits
    return [found[node] for node in range(len(ptr) - 1)]


def _missing_us(problem: RematProblem, node: int, alive: NDArray[np.bool_], again: NDArray[np.float64], limit_bytes: int) -> float:
    """What is not there at a moment costs at least so much: as if bytes could be kept in part."""
    base = problem.problem
    reads = base.reads.ids[base.reads.ptr[node] : base.reads.ptr[node + 1]]
    takes = base.takes.ids[base.takes.ptr[node] : base.takes.ptr[node + 1]]
    taken = int(base.tensor_bytes[base.take_output[node]]) if len(takes) else 0
    own = np.zeros(base.tensor_count, np.bool_)
    own[reads] = True
    needs = int(base.tensor_bytes[own].sum() + base.made_bytes[node] + base.workspace_bytes[node]) - taken
    room = limit_bytes - base.resident_bytes - needs
    others = alive & ~own
    pinned = others & np.isinf(again)
    room -= int(base.tensor_bytes[pinned].sum())
    if room < 0:
        return np.inf
    free = np.flatnonzero(others & ~pinned & (base.tensor_bytes > 0))
    order = free[np.argsort(-again[free] / base.tensor_bytes[free], kind="stable")]
    sizes, times = base.tensor_bytes[order], again[order]
    left = np.clip(room - (np.cumsum(sizes) - sizes), 0, sizes)
    return float((times * (1 - left / np.maximum(sizes, 1))).sum())
