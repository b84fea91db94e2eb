"""What a scheduler is, and the one shape of its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from lowtide.base.solver_text import check_amounts, described, replaced
from lowtide.cost.memory import simulate
from lowtide.problems import Status
from lowtide.problems.order import OrderProblem
from lowtide.schedule.cuts import lower_bound_bytes


@dataclass(frozen=True, slots=True)
class Schedule:
    """An order of a problem's nodes, and what is known of its peak."""

    order: tuple[int, ...]  # node indices, first to run first; empty where infeasible
    peak_bytes: int  # with what is resident; where infeasible, the lower bound
    lower_bound_bytes: int  # no order has a lower peak
    status: Status
    solver: str  # that found it, with the settings that are not its defaults: "ReadyList(oldest='waiting')"
    stats: Mapping[str, int] = field(default_factory=dict)  # effort, by the solver's own names


@runtime_checkable
class Solver(Protocol):
    """A way to find an order: a frozen dataclass whose fields are its settings."""

    def solve(self, problem: OrderProblem) -> Schedule:
        """An order of `problem`; the same problem and settings always give the same one."""
        ...


@runtime_checkable
class Anytime(Protocol):
    """A solver that answers early, and then better and better."""

    def answers(self, problem: OrderProblem) -> Iterator[Schedule]:
        """At least one schedule, none with a higher peak or a lower bound than the one before; the last is what `solve` gives."""
        ...

    def solve(self, problem: OrderProblem) -> Schedule:
        """The least peak that was found, with the highest bound that was proven."""
        *_, last = self.answers(problem)
        return last


def answers(problem: OrderProblem, solver: Solver) -> Iterator[Schedule]:
    """All that `solver` has to say, the best last: for callers who may have to stop it early."""
    if isinstance(solver, Anytime):
        yield from solver.answers(problem)
    else:
        yield solver.solve(problem)


def scheduled(
    problem: OrderProblem, order: ArrayLike, solver: Solver, *, bound_bytes: int = 0, stats: Mapping[str, int] | None = None
) -> Schedule:
    """The result of a solver that found `order` and proved that no order's peak is below `bound_bytes`.

    Simulates the order, so that no solver answers for its own peak. Raises CheckError unless it is a topological order.
    """
    footprint = simulate(problem, order)
    bound_bytes = max(bound_bytes, lower_bound_bytes(problem))
    status = Status.OPTIMAL if footprint.peak_bytes == bound_bytes else Status.FEASIBLE
    return Schedule(tuple(np.asarray(order).tolist()), footprint.peak_bytes, bound_bytes, status, described(solver), stats or {})


def checked(solver: object) -> Solver:
    """What a user gave as a solver. Raises TypeError for anything else, its class or its name too; ValueError."""
    if isinstance(solver, type) or not isinstance(solver, Solver):
        raise TypeError(f"solver: expected a value like lowtide.schedule.Best(), got {solver!r}")
    check_amounts(solver)
    return solver


def limited(solver: Solver, *, max_states: int | None = None, max_seconds: float | None = None) -> Solver:
    """`solver` with these settings in place of its own; None leaves one as it is. Raises FormatError where it has no such setting."""
    return replaced(checked(solver), {"max_states": max_states, "max_seconds": max_seconds})
