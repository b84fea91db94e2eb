"""What `schedule` does where nobody names a solver; and a small problem on which a solver has to use all that it has.

Solving that loads compiled kernels from disk, or compiles them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from lowtide.problems import Status
from lowtide.problems.order import OrderProblem, Task
from lowtide.schedule.base import Anytime, Schedule, Solver
from lowtide.schedule.beam import Beam
from lowtide.schedule.best import Best
from lowtide.schedule.cuts import cut_bound_bytes
from lowtide.schedule.exact import Exact
from lowtide.schedule.repair import Repair

_WINDOWS = 4  # a window may take a fourth of the states: where the whole is hard, so is a window that is nearly the whole
_MOVES_A_STATE, _MOVES_A_NODE = 15, 50  # what searches of training steps take at most before they end with a proof


@dataclass(frozen=True)
class Auto(Anytime):
    """Simple orders, minimum cuts and exact search; where that ends without proof, windows around the peak are ordered anew.

    On training steps of today's networks the search usually ends with a proof after a few hundred states. Where it does not, it ends
    within about a second, with its gap: states that are never enough for a proof seldom find a better order. More `max_states` search on.
    `max_moves` is 15 a state and 50 a node where it is left out. The answer's `solver` is the one that found the order.
    """

    max_states: int = 24_000
    max_moves: int | None = None
    max_seconds: float = math.inf

    def answers(self, problem: OrderProblem) -> Iterator[Schedule]:
        end = time.monotonic() + self.max_seconds
        moves = _MOVES_A_STATE * self.max_states + _MOVES_A_NODE * problem.node_count if self.max_moves is None else self.max_moves
        for schedule_found in Exact(max_states=self.max_states, max_moves=moves, max_seconds=self.max_seconds).answers(problem):
            yield schedule_found
        if schedule_found.status is not Status.FEASIBLE or time.monotonic() > end:
            return
        searched = schedule_found
        inner = Exact(max_states=self.max_states // _WINDOWS, first=Beam())
        for repaired in Repair(inner, FixedAnswer(searched), max_moves=moves).answers(problem):
            if repaired.peak_bytes < schedule_found.peak_bytes or repaired.lower_bound_bytes > schedule_found.lower_bound_bytes:
                schedule_found = repaired
            yield replace(schedule_found, stats={**searched.stats, **repaired.stats})
            if time.monotonic() > end:
                return


@dataclass(frozen=True)
class FixedAnswer:
    """The answer of an earlier solver, for another one to start from."""

    schedule: Schedule = field(repr=False)

    def solve(self, problem: OrderProblem) -> Schedule:
        return self.schedule


AUTO = Auto()


def schedule(problem: OrderProblem, solver: Solver = AUTO) -> Schedule:
    """An order of `problem` of low peak memory, by `solver`; the least that can be found and proven where it is left out."""
    return solver.solve(problem)


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
