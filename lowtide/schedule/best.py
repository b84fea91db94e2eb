"""The solver that asks several others, and of several problems the one of least peak: what a problem cannot win is not searched for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lowtide.problems import Status
from lowtide.problems.order import OrderProblem
from lowtide.schedule.base import Schedule, Solver, answers
from lowtide.schedule.greedy import ProgramOrder, ReadyList, ReversePostOrder

_QUICK: tuple[Solver, ...] = (ProgramOrder(), ReadyList(), ReadyList("waiting"), ReversePostOrder("outputs"), ReversePostOrder("inputs"))


@dataclass(frozen=True)
class Best:
    """The best answer of several solvers, of equal ones the earliest; it stops at the first that is proven optimal."""

    solvers: tuple[Solver, ...] = _QUICK

    def __post_init__(self) -> None:
        if not self.solvers:
            raise ValueError("solvers: expected at least one, got none")

    def solve(self, problem: OrderProblem) -> Schedule:
        """The least peak that a solver found, held against the best bound that one proved."""
        schedules: list[Schedule] = []
        for solver in self.solvers:
            schedules.append(solver.solve(problem))
            if schedules[-1].status is not Status.FEASIBLE:
                break
        return _combined(schedules)


def _combined(schedules: list[Schedule]) -> Schedule:
    best = min(schedules, key=lambda answer: (answer.status is Status.INFEASIBLE, answer.peak_bytes))
    bound_bytes = max(answer.lower_bound_bytes for answer in schedules)
    status = Status.OPTIMAL if best.peak_bytes == bound_bytes and best.status is Status.FEASIBLE else best.status
    return replace(best, lower_bound_bytes=bound_bytes, status=status)


def schedule_all(problems: Sequence[OrderProblem], solver: Solver, enough_bytes: int = 0) -> list[Schedule]:
    """An order of each problem, searched for as long as it may turn out to be the one of least peak of all, of equal ones the first.

    The problems are searched by turns. One whose proven bound says that it cannot win any more is left with what was found until then: it
    costs little more than its simple orders and cuts. The best of all is what solving each of them would give; where it needs no more
    than `enough_bytes`, it is searched no further.
    """
    searches = [_OrderSearch(index, answers(problem, solver)) for index, problem in enumerate(problems)]
    open_ = searches
    best = min(searches, key=_OrderSearch.rank)
    while open_ and best.schedule.peak_bytes > enough_bytes:
        open_ = [search for search in open_ if search.go_on()]
        best = min(searches, key=_OrderSearch.rank)
        open_ = [search for search in open_ if search is best or (search.schedule.lower_bound_bytes, search.index) < best.rank()]
    return [search.schedule for search in searches]


class _OrderSearch:
    def __init__(self, index: int, answers: Iterator[Schedule]) -> None:
        self.index = index
        self.schedule = next(answers)
        self._answers = answers

    def go_on(self) -> bool:
        """A little more search; False where it had come to its end."""
        later = next(self._answers, None)
        self.schedule = later or self.schedule
        return later is not None

    def rank(self) -> tuple[int, int]:
        """Less is better."""
        return self.schedule.peak_bytes, self.index
