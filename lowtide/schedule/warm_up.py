"""A small problem on which a solver has to use all that it has: solving it loads compiled kernels from disk, or compiles them."""

from __future__ import annotations

from lowtide.problems.order import OrderProblem
from lowtide.problems.order_check import Task
from lowtide.schedule.base import Solver
from lowtide.schedule.best import Best
from lowtide.schedule.cuts import cut_bound_bytes

# Simple orders miss the optimum here, no cut proves it, and the exact search branches hundreds of times, in both directions of time.
_BYTES = (13, 2, 13, 13, 3, 3, 3, 13, 13, 5, 2, 1, 3, 8)
_READS = ((), (0,), (0, 1), (0, 1), (), (4,), (), (2,), (4,), (), (3, 8), (7, 9), (6, 10), (7,))


def warm_up(solver: Solver) -> None:
    """Has the kernels of `solver` loaded, so that seconds taken from now on are its own."""
    solver.solve(_problem())


def warm_up_beside_search() -> None:
    """Has the kernels loaded that `Auto` needs beside those of the exact search: of simple orders and of cuts."""
    problem = _problem()
    cut_bound_bytes(problem, Best().solve(problem).order)


def _problem() -> OrderProblem:
    return OrderProblem.of(_BYTES, [Task("node", makes=(node,), reads=reads) for node, reads in enumerate(_READS)])
