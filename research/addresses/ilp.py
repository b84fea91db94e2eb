"""MODeL's address program, solved through ortools' MathOpt: a reference solver.

Steiner et al., "MODeL: Memory Optimizations for Deep Learning", section 3.3. Numbers in brackets are the paper's constraints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from lowtide.placement.base import Placement
from lowtide.problems.placement import FREE, PlaceProblem
from research.addresses.common import Found, Model, answered, first_placement, is_answer
from research.needs import need_ortools

_LIMIT_UNITS = 2**19  # of an arena: a solver's tolerance of a millionth is then about half a unit
_TOLERANCE = 1e-6
_SOLVERS = ("highs", "scip", "cp-sat")


@dataclass(frozen=True)
class Addresses:
    """An address for each buffer, and for each two that share a step a binary variable that says which lies below: (6) to (8).

    With lives given, the paper's a + b is 1 for such a pair and both are free for any other: one binary variable says it, and pairs that
    never meet have none. Beyond the paper:

    - M is not the sum of all sizes but the best heuristic's arena, or the capacity: no best placement has an address above.
    - An address is a multiple of the buffer's alignment, or fixed.
    - Under a capacity nothing is minimised: the first placement found is the answer.
    - Of the addresses found only the sequence is taken, and buffers are put down anew in that sequence: within a solver's tolerance a
      binary variable of 0.000001 times M can let two buffers overlap.

    The bound is the solver's own, less its tolerance, rounded to whole units; where the sizes' common divisor is too small a unit for
    that, sizes are rounded down, and the bound may stay below the optimum. `max_seconds` makes the answer depend on the machine's speed
    where it cuts the solver short. A program of more than `max_pairs` is not built: the answer then is the heuristic's.

    Raises ImportError where ortools is not installed, ValueError for an unknown solver.
    """

    solver: Literal["highs", "scip", "cp-sat"] = "highs"
    max_seconds: float = 600.0
    max_pairs: int = 100_000

    def __post_init__(self) -> None:
        if self.solver not in _SOLVERS:
            raise ValueError(f"solver: expected one of {', '.join(map(repr, _SOLVERS))}, got {self.solver!r}")
        if not self.max_seconds > 0:
            raise ValueError(f"max_seconds: expected more than 0, got {self.max_seconds}")

    def place(self, problem: PlaceProblem, capacity_bytes: int | None = None) -> Placement:
        """The solver's placement and bound, or the best heuristic's where it is no worse. `stats` count the pairs."""
        need_ortools(self)
        first = first_placement(problem, capacity_bytes)
        model = Model.of(problem, first.arena_bytes, _LIMIT_UNITS)
        if is_answer(first, capacity_bytes) or model.pair_count > self.max_pairs:
            return answered(problem, self, model, first, Found(), capacity_bytes)
        program = _Program(model, first, capacity_bytes)
        return answered(problem, self, model, first, program.solve(self), capacity_bytes)


class _Program:
    """The integer program in MathOpt."""

    def __init__(self, model: Model, first: Placement, capacity_bytes: int | None) -> None:
        from ortools.math_opt.python import mathopt

        self.programopt: Any = mathopt
        self.program: Any = mathopt.Model()
        self.question = capacity_bytes is not None
        self.most = (first.arena_bytes if capacity_bytes is None else capacity_bytes) // model.unit_bytes
        self.size, self.align = model.size.tolist(), model.align.tolist()
        self.hints = [first.offsets[buffer] // model.unit_bytes for buffer in model.buffers.tolist()]
        self.multiple = [self._multiple(each, fixed) for each, fixed in enumerate(model.fixed.tolist())]
        self.pairs = model.pairs.tolist()
        self.below = [self._apart(one, other) for one, other in self.pairs]
        if not self.question:
            self._arena(first.lower_bound_bytes // model.unit_bytes)

    def solve(self, settings: Addresses) -> Found:
        """What the solver finds and proves."""
        mathopt = self.programopt
        kind = {"highs": mathopt.SolverType.HIGHS, "scip": mathopt.SolverType.GSCIP, "cp-sat": mathopt.SolverType.CP_SAT}[settings.solver]
        parameters = mathopt.SolveParameters(
            time_limit=timedelta(seconds=settings.max_seconds),
            random_seed=0,
            threads=None if settings.solver == "highs" else 1,  # HiGHS refuses to be told, and takes one
            relative_gap_tolerance=0.0,
            absolute_gap_tolerance=0.1,  # the objective is a whole number
        )
        result = mathopt.solve(self.program, kind, params=parameters, model_params=self._hint())
        stats = {"pairs": len(self.pairs)}
        if result.termination.reason is mathopt.TerminationReason.INFEASIBLE and self.question:
            return Found(least_units=self.most + 1, stats=stats)
        least = 0 if self.question else _least(result.termination.objective_bounds.dual_bound)
        return Found(self._offsets(result) if result.has_primal_feasible_solution() else None, least, stats)

    def _offsets(self, result: Any) -> tuple[float, ...]:
        return tuple(value * align for value, align in zip(result.variable_values(self.multiple), self.align, strict=True))

    def _multiple(self, each: int, fixed: int) -> Any:
        """The address of a buffer, in multiples of its alignment."""
        align = self.align[each]
        least = 0 if fixed == FREE else fixed // align
        most = max(0, self.most - self.size[each]) // align if fixed == FREE else least
        return self.program.add_integer_variable(lb=least, ub=most)

    def _apart(self, one: int, other: int) -> Any:
        """(6) and (7): the variable is 1 where `one` lies below `other`, and 0 where above."""
        below = self.program.add_binary_variable()
        self._under(one, other, below, 1)
        self._under(other, one, below, 0)
        return below

    def _under(self, lower: int, upper: int, below: Any, value: int) -> None:
        """(7a), (7b): address + size of `lower` <= address of `upper` where `below` has the value, and no more than M apart else."""
        constraint = self.program.add_linear_constraint(lb=-math.inf, ub=self.most * value - self.size[lower])
        constraint.set_coefficient(self.multiple[lower], self.align[lower])
        constraint.set_coefficient(self.multiple[upper], -self.align[upper])
        constraint.set_coefficient(below, self.most * (2 * value - 1))

    def _arena(self, least_units: int) -> None:
        """(8)."""
        arena = self.program.add_integer_variable(lb=least_units, ub=self.most)
        for multiple, align, size in zip(self.multiple, self.align, self.size, strict=True):
            constraint = self.program.add_linear_constraint(lb=-math.inf, ub=-size)
            constraint.set_coefficient(multiple, align)
            constraint.set_coefficient(arena, -1)
        self.program.minimize(arena)

    def _hint(self) -> Any:
        """The best heuristic's placement; none where it does not fit."""
        mathopt = self.programopt
        if self.question:
            return mathopt.ModelSolveParameters()
        guess = {multiple: hint // align for multiple, hint, align in zip(self.multiple, self.hints, self.align, strict=True)}
        guess |= {below: int(self.hints[one] < self.hints[other]) for below, (one, other) in zip(self.below, self.pairs, strict=True)}
        values = {variable: float(value) for variable, value in guess.items()}
        return mathopt.ModelSolveParameters(solution_hints=[mathopt.SolutionHint(variable_values=values)])


def _least(dual: float) -> int:
    """The whole units that a solver's bound says, less its tolerance."""
    return max(0, math.ceil(dual - _TOLERANCE * abs(dual) - 1e-3)) if math.isfinite(dual) else 0
