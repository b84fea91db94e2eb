"""Order and addresses together: the smallest arena that a program can run in, whatever the order and wherever its tensors lie.

The arena of an order is at least its peak less what is resident, and more where addresses leave gaps. So no arena is below the least peak
of all orders; the default way finds an order of that peak first and then its addresses, and where the two meet, nothing was lost by asking
one after the other. `Model` asks for both at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast, runtime_checkable

from numpy.typing import ArrayLike

from lowtide.base.solver_text import described
from lowtide.placement import AUTO as PLACE
from lowtide.placement import Placement, Placer
from lowtide.problems import Status
from lowtide.problems.order import OrderProblem
from lowtide.problems.placement import PlaceProblem
from lowtide.schedule import AUTO as ORDER
from lowtide.schedule import Schedule, Solver
from lowtide.schedule.base import scheduled
from research.buffers import place_problem


@dataclass(frozen=True, eq=False)
class JointProblem:
    """An ordering problem whose tensors and workspaces need addresses too."""

    order: OrderProblem
    align_bytes: int = 1  # of every address

    def buffers(self, order: ArrayLike) -> PlaceProblem:
        """What needs an address under an order. Raises CheckError unless it is a topological one."""
        return place_problem(self.order, order, align_bytes=self.align_bytes)


@dataclass(frozen=True, slots=True)
class Joint:
    """An order with addresses, and what is known of their arena."""

    schedule: Schedule
    placement: Placement  # of `JointProblem.buffers(schedule.order)`
    lower_bound_bytes: int  # no order has a smaller arena; what is resident lies in none
    status: Status
    solver: str  # that found it, with the settings that are not its defaults
    stats: Mapping[str, int] = field(default_factory=dict)  # effort, by the solver's own names

    @property
    def arena_bytes(self) -> int:
        """Beside what is resident."""
        return self.placement.arena_bytes


@runtime_checkable
class JointSolver(Protocol):
    """A way to find order and addresses: a frozen dataclass whose fields are its settings."""

    def solve(self, problem: JointProblem) -> Joint:
        """Both; the same problem and settings always give the same."""
        ...


@dataclass(frozen=True)
class TwoStep:
    """Order first, then its addresses: what is done where nobody asks for more."""

    order: Solver = ORDER
    placer: Placer = PLACE

    def solve(self, problem: JointProblem) -> Joint:
        """Jointly optimal where the arena meets the bound on every order's peak; otherwise the gap says how far it may be from that."""
        schedule = self.order.solve(problem.order)
        placement = self.placer.place(problem.buffers(schedule.order))
        return joined(problem, schedule, placement, self)


TWO_STEP = TwoStep()


def joint(problem: JointProblem, solver: JointSolver = TWO_STEP) -> Joint:
    """Order and addresses of a small arena, by `solver`."""
    return solver.solve(problem)


def joined(
    problem: JointProblem,
    schedule: Schedule,
    placement: Placement,
    solver: JointSolver,
    *,
    bound_bytes: int = 0,
    stats: Mapping[str, int] | None = None,
) -> Joint:
    """The result of a solver that found both and proved that no order has an arena below `bound_bytes`.

    Plays the order again, so that no solver answers for itself; a placement was checked when it was made. Raises CheckError unless the
    order is a topological one.
    """
    replay = scheduled(problem.order, schedule.order, named(solver), bound_bytes=schedule.lower_bound_bytes)
    largest_bytes = int(max(problem.order.tensor_bytes.max(initial=0), problem.order.workspace_bytes.max(initial=0)))
    bound_bytes = max(bound_bytes, replay.lower_bound_bytes - problem.order.resident_bytes, largest_bytes)
    status = Status.OPTIMAL if placement.arena_bytes <= bound_bytes else Status.FEASIBLE
    return Joint(schedule, placement, bound_bytes, status, described(named(solver)), stats or {})


def named(solver: JointSolver) -> Solver:
    """A joint solver in the place of one of orders, where only its name and settings are wanted."""
    return cast(Solver, solver)
