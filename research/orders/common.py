"""What the reference solvers share: the order that they start from, and the steps at which a node can run."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowtide.base.kernels import kernel
from lowtide.cost.memory import simulate
from lowtide.problems.order import Ints, OrderProblem
from lowtide.schedule.base import Schedule
from lowtide.schedule.best import Best
from lowtide.schedule.greedy import ProgramOrder, ReadyList, ReversePostOrder

_FIRST = Best((ReadyList(), ReadyList("waiting"), ReversePostOrder("outputs"), ReversePostOrder("inputs"), ProgramOrder()))


def first_order(problem: OrderProblem) -> Schedule:
    """The best order of the quick heuristics, whose peak a reference solver has to beat or to prove."""
    return _FIRST.solve(problem)


def better_order(problem: OrderProblem, order: ArrayLike, first: Schedule) -> ArrayLike:
    """The order of lower peak, `first` where they are equal: a solver that rounds its objective may find a worse one than it was given."""
    return order if simulate(problem, order).peak_bytes < first.peak_bytes else first.order


class Windows(NamedTuple):
    """The steps at which each node can run: as many before it as it has ancestors, as many after it as it has descendants."""

    first: Ints  # [n]
    last: Ints  # [n]


def windows(problem: OrderProblem, order: ArrayLike) -> Windows:
    """The windows of all nodes, in O(n edges / 64) (ICCAD'23, constraints (7) and (9)); `order` is any topological order."""
    steps = np.asarray(order, np.int32)
    last = problem.node_count - 1 - _reachable(steps[::-1].copy(), *problem.succs)
    return Windows(_reachable(steps, *problem.preds), last.astype(np.int32))


@kernel
def _reachable(order: Any, ptr: Any, ids: Any) -> NDArray[np.int32]:
    """[n] how many nodes each one reaches along `ids`; in `order`, all that a node reaches comes before it. 64 targets at a time."""
    n, one = len(order), np.uint64(1)
    counts, seen = np.zeros(n, np.int32), np.zeros(n, np.uint64)
    for block in range(0, n, 64):
        for node in order:
            bits = np.uint64(0)
            for entry in range(ptr[node], ptr[node + 1]):
                other = ids[entry]
                bits |= seen[other]
                if block <= other < block + 64:
                    bits |= one << np.uint64(other - block)
            seen[node] = bits
            while bits:
                bits &= bits - one
                counts[node] += 1
    return counts
