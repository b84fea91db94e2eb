"""The exact engine: orders proven to have the least peak, or a gap that is proven."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lowtide.problems import Status
from lowtide.problems.order import OrderProblem
from lowtide.schedule.base import Anytime, Schedule, Solver, scheduled
from lowtide.schedule.best import Best
from lowtide.schedule.cuts import cut_bound_bytes
from lowtide.schedule.downsets import MOVES, DownsetWalk, net_of, start
from lowtide.schedule.threshold import FOUND, FULL, NO, STATES, YES, DownsetTable, enlarge, new_stack, new_table, reset, search

_CHUNK = 256  # states that one direction of time searches before it is the other's turn, and between two looks at the clock

_CHUNK_MOVES = 2_000_000  # the same in moves
_SLOT_BYTES = 24  # of a table
_NO_EFFORT = {"states": 0, "moves": 0}


@dataclass(frozen=True)
class Exact(Anytime):
    """Threshold search over downsets: closes in on the least peak from both sides, in both directions of time.

    Effort is counted in states (downsets entered), and in moves (nodes run), of which large problems take many a state; the seconds and
    the bytes of its tables are caps. Stopped early, it answers with the best order so far and the bound that it proved.
    """

    max_states: int = 1_000_000
    max_moves: int = 1_000_000_000
    max_seconds: float = math.inf
    max_bytes: int = 2**30
    max_cuts: int = 64
    first: Solver = field(default=Best(), repr=False)

    def answers(self, problem: OrderProblem) -> Iterator[Schedule]:
        """Better and better orders and bounds, the latest after each chunk of effort."""
        began = time.monotonic()
        first = self.first.solve(problem)
        schedule = scheduled(problem, first.order, self, bound_bytes=first.lower_bound_bytes, stats=_NO_EFFORT)
        yield schedule
        if schedule.status is Status.FEASIBLE:
            cut = cut_bound_bytes(problem, schedule.order, max_cuts=self.max_cuts)
            schedule = scheduled(problem, schedule.order, self, bound_bytes=cut.bound_bytes, stats=_NO_EFFORT)
            yield schedule
        if schedule.status is not Status.FEASIBLE:
            return
        hunt = _BoundHunt(problem, self)
        resident = problem.resident_bytes
        while schedule.status is Status.FEASIBLE and hunt.may_go_on and time.monotonic() - began < self.max_seconds:
            bound, order = hunt.go_on(schedule.lower_bound_bytes - resident, schedule.peak_bytes - resident)
            if bound > schedule.lower_bound_bytes - resident or order is not None:
                schedule = scheduled(
                    problem,
                    schedule.order if order is None else order,
                    self,
                    bound_bytes=max(bound + resident, schedule.lower_bound_bytes),
                    stats=hunt.stats,
                )
            yield replace(schedule, stats=hunt.stats)  # after each chunk, whether or not it found any: whoever listens may have had enough


class _Side:
    """One direction of time: its walk, and what it learned."""

    def __init__(self, problem: OrderProblem, backwards: bool, max_bytes: int) -> None:
        self.net = net_of(problem, backwards)
        self.backwards = backwards
        self.walk: DownsetWalk = start(self.net)
        self.stack = new_stack(problem.node_count)
        self.table: DownsetTable = new_table(1 << 4)
        self.max_bytes = max_bytes

    @property
    def states(self) -> int:
        return int(self.stack.registers[STATES])

    @property
    def moves(self) -> int:
        return int(self.walk.registers[MOVES])

    def begin(self, bound_bytes: int) -> None:
        """Turns to the question whether there is an order within `bound_bytes`; what was learned from others is kept."""
        self.bound_bytes = bound_bytes
        reset(self.net, self.walk, self.stack)

    def go_on(self) -> int:
        """YES, NO, or PAUSED after some effort more."""
        states, moves, may_grow = self.states + _CHUNK, self.moves + _CHUNK_MOVES, True
        while True:
            answer = int(search(self.net, self.walk, self.stack, self.table, self.bound_bytes, states, moves, may_grow))
            if answer != FULL:
                return answer
            may_grow = self._grow()

    @property
    def proven_bytes(self) -> int:
        """After NO: no order has a lower peak."""
        return int(self.stack.registers[FOUND])

    def order(self) -> NDArray[np.int32]:
        order: NDArray[np.int32] = self.walk.order.copy()
        return order[::-1] if self.backwards else order

    def _grow(self) -> bool:
        if 2 * _SLOT_BYTES * len(self.table.words) > self.max_bytes:
            return False
        larger = new_table(2 * len(self.table.words))
        enlarge(self.table, larger)
        self.table = larger
        return True


class _BoundHunt:
    """Which bound to ask about, and which side, next.

    Questions are asked in the middle between the proven bound and the peak. One that neither direction of time answers within the present
    quota of states is put aside, and others beside it are tried; when all are hard, the quota grows.
    """

    def __init__(self, problem: OrderProblem, solver: Exact) -> None:
        self.sides = [_Side(problem, backwards, solver.max_bytes // 2) for backwards in (False, True)]
        self.solver = solver
        self.quota = _CHUNK * (4 + problem.node_count // _CHUNK)
        self.hard: list[int] = []
        self.bound_bytes = -1
        self.spent = 0

    @property
    def stats(self) -> dict[str, int]:
        return {"states": sum(side.states for side in self.sides), "moves": sum(side.moves for side in self.sides)}

    @property
    def may_go_on(self) -> bool:
        stats = self.stats
        return stats["states"] < self.solver.max_states and stats["moves"] < self.solver.max_moves

    def go_on(self, low: int, high: int) -> tuple[int, NDArray[np.int32] | None]:
        """A little more search for orders from `low` to below `high`: a proven bound, and an order where one was found."""
        if not low <= self.bound_bytes < high:
            self._turn_to(self._next(low, high))
        for side in self.sides:
            answer = side.go_on()
            if answer == YES:
                self.bound_bytes = -1
                return low, side.order()
            if answer == NO:
                self.bound_bytes = -1
                return min(side.proven_bytes, high), None
        self.spent += _CHUNK
        if self.spent >= self.quota:
            self.hard.append(self.bound_bytes)
            self.bound_bytes = -1
        return low, None

    def _turn_to(self, bound_bytes: int) -> None:
        self.bound_bytes, self.spent = bound_bytes, 0
        for side in self.sides:
            side.begin(bound_bytes)

    def _next(self, low: int, high: int) -> int:
        """The middle of the widest stretch beside the questions put aside, which are taken up again when little is left between them."""
        self.hard = sorted(bound for bound in self.hard if low <= bound < high)
        if not self.hard:
            return (low + high) // 2
        above, below = high - 1 - self.hard[-1], self.hard[0] - low
        if max(above, below) <= (high - low) // 64:
            self.hard.clear()
            self.quota *= 4
            return (low + high) // 2
        return self.hard[-1] + (above + 1) // 2 if above >= below else low + below // 2
