"""The solver that asks several others."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowtide.problems.order import OrderProblem
from lowtide.problems.status import Status
from lowtide.schedule.base import Schedule, Solver
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
        found: list[Schedule] = []
        for solver in self.solvers:
            found.append(solver.solve(problem))
            if found[-1].status is not Status.FEASIBLE:
                break
        return _combined(found)


def _combined(found: list[Schedule]) -> Schedule:
    best = min(found, key=lambda answer: (answer.status is Status.INFEASIBLE, answer.peak_bytes))
    bound_bytes = max(answer.lower_bound_bytes for answer in found)
    status = Status.OPTIMAL if best.peak_bytes == bound_bytes and best.status is Status.FEASIBLE else best.status
    return replace(best, lower_bound_bytes=bound_bytes, status=status)
