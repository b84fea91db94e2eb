"""What the programs in ortools' CP-SAT share: their effort, and how they are solved."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

from lowtide.errors import CheckError


class Settings(Protocol):
    """How far CP-SAT may look."""

    @property
    def max_effort(self) -> float:
        """CP-SAT's deterministic time, about a second a unit."""

    @property
    def max_seconds(self) -> float:
        """A cap by the clock."""

    @property
    def workers(self) -> int:
        """Threads."""


class Solved(NamedTuple):
    """What CP-SAT said of a program."""

    solver: Any  # knows the values of variables
    is_found: bool
    is_infeasible: bool
    least: int  # no solution has an objective below, as a whole number of at least 0
    effort: dict[str, int]


def check_settings(settings: Settings) -> None:
    """Raises ValueError for effort that is none."""
    if not (settings.max_effort > 0 and settings.max_seconds > 0 and settings.workers > 0):
        raise ValueError(f"expected max_effort, max_seconds and workers above 0, got {settings}")


def solve(program: Any, settings: Settings, *, is_question: bool = False) -> Solved:
    """Solve a program with a hint: the same effort gives the same answer on every machine.

    A question has no objective, and may be infeasible.
    Raises CheckError where CP-SAT refuses the program, or finds infeasible what its hint solves.
    """
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = settings.workers
    solver.parameters.interleave_search = settings.workers > 1  # several workers that give one answer
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = settings.max_effort
    solver.parameters.max_time_in_seconds = settings.max_seconds
    status = _status(solver, program)
    is_infeasible = status == cp_model.INFEASIBLE and is_question
    if not is_infeasible and status not in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
        raise CheckError(f"{settings!r}: expected CP-SAT to accept a model that its hint solves, got {solver.status_name(status)}")
    bound = 0.0 if is_question else solver.best_objective_bound
    least = max(0, round(bound)) if math.isfinite(bound) else 0
    effort = {"branches": int(solver.num_branches), "conflicts": int(solver.num_conflicts)}
    return Solved(solver, status in (cp_model.OPTIMAL, cp_model.FEASIBLE), is_infeasible, least, effort)


def _status(solver: Any, program: Any) -> Any:
    """What became of the search."""
    try:
        return solver.solve(program)
    except IndexError:  # ortools 9.15's presolve can lose a hint's value (or-tools issue 5288): the same without a hint
        program.clear_hints()
        return solver.solve(program)
