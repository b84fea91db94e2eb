"""The dynamic programme over downsets, level by level, with Serenity's adaptive soft budget: a reference solver.

A downset is a set of executed nodes closed under predecessors. Live memory depends on it alone, so of all the ways to reach one only the
least peak matters. Level k holds the downsets of k nodes; the one at the last level holds the optimum.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lowtide.problems import Status
from lowtide.problems.order import Ints, OrderProblem
from lowtide.schedule.base import Schedule, scheduled
from research.orders.common import first_order
from research.orders.sweep import SOLVED, UNBOUNDED, WIDE, Net, net_of, state_bytes, sweep

_FIRST_WIDTH = 1024  # of a level, in states


@dataclass(frozen=True)
class DynamicProgramme:
    """The least peak of every downset, after Serenity (Ahn et al., MLSys 2020).

    With `soft_budget`, only downsets within a budget are kept, at first below the best heuristic's peak. Where a level grows too wide
    the budget falls, half the way to the proven lower bound; where no order is within, it rises, and so does the bound (Serenity's
    adaptive soft budgeting, its width counted in states instead of seconds). When nothing is left between the two, levels may grow four
    times as wide, as far as effort and memory allow. Without it, every downset is kept: the plain dynamic programme.

    Downsets are compared bit by bit, so a proof rests on no hash. Past its limits it answers with the best heuristic's order.
    """

    max_states: int = 4_000_000  # downsets kept, over all rounds
    soft_budget: bool = True
    max_bytes: int = 2**30  # of memory, about

    def __post_init__(self) -> None:
        if self.max_states < 1 or self.max_bytes < 1:
            raise ValueError(f"expected max_states and max_bytes of at least 1, got {self.max_states} and {self.max_bytes}")

    def solve(self, problem: OrderProblem) -> Schedule:
        """An order of least peak, or the best heuristic's order and the bound proven so far."""
        first = first_order(problem)
        if first.status is Status.OPTIMAL:
            return scheduled(problem, first.order, self, bound_bytes=first.lower_bound_bytes, stats={"states": 0, "rounds": 0})
        search = _Search(net_of(problem), self.max_states, self.max_bytes)
        resident_bytes = problem.resident_bytes
        if self.soft_budget:
            bound_bytes, order = search.softly(first.lower_bound_bytes - resident_bytes, first.peak_bytes - resident_bytes)
        else:
            bound_bytes, order = search.plainly()
        stats = {"states": search.states, "rounds": search.rounds}
        return scheduled(problem, first.order if order is None else order, self, bound_bytes=resident_bytes + bound_bytes, stats=stats)


@dataclass
class _Search:
    """Sweeps over the downsets, and their effort so far. Bytes are without what is resident."""

    net: Net
    max_states: int
    max_bytes: int
    states: int = 0
    rounds: int = 0
    bound_bytes: int = 0
    order: Ints | None = field(default=None)

    def plainly(self) -> tuple[int, Ints | None]:
        """One sweep that keeps all: the bound proven, and an order that meets it if one was found."""
        self._sweep(UNBOUNDED, self._widest())
        return self.bound_bytes, self.order

    def softly(self, bound_bytes: int, known_bytes: int) -> tuple[int, Ints | None]:
        """Sweeps below `known_bytes`, the peak of a known order: the bound proven, and an order that meets it if a better one was found."""
        self.bound_bytes, width, wide_bytes = bound_bytes, min(_FIRST_WIDTH, self._widest()), known_bytes
        while self.order is None and self.bound_bytes < known_bytes and self.states < self.max_states:
            if self.bound_bytes < wide_bytes:
                halfway_bytes = (self.bound_bytes + wide_bytes) // 2
                budget_bytes = known_bytes - 1 if wide_bytes == known_bytes else halfway_bytes
                if self._sweep(budget_bytes, width) == WIDE:
                    wide_bytes = budget_bytes
            elif width < self._widest():
                width, wide_bytes = min(4 * width, self._widest()), known_bytes
            else:
                break
        return self.bound_bytes, self.order

    def _sweep(self, budget_bytes: int, width: int) -> int:
        """One sweep; what it proves raises the bound."""
        outcome, peak_bytes, states, order = sweep(self.net, budget_bytes, width, min(self.max_states - self.states, self._longest()))
        self.states, self.rounds = self.states + states, self.rounds + 1
        if outcome != WIDE:
            self.bound_bytes = max(self.bound_bytes, peak_bytes)
        if outcome == SOLVED:
            self.order = order
        return int(outcome)

    def _widest(self) -> int:
        """The states of a level that half the memory has room for: two levels, and a copy of one that grows."""
        return max(1, min(self.max_states, self.max_bytes // 2 // (3 * state_bytes(len(self.net.own_bytes)))))

    def _longest(self) -> int:
        """The states of a sweep whose traces the other half has room for: eight bytes each, and a copy twice as long as it grows."""
        return max(1, self.max_bytes // 2 // 24)
