"""The time-indexed integer program of ICCAD'23, solved through ortools' MathOpt: a reference solver.

Zhong et al., "Memory-aware Scheduling for Complex Wired Networks with Iterative Graph Optimization", section IV-A. Numbers in brackets
are the paper's constraints.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple

from lowtide.problems import Status
from lowtide.problems.order import OrderProblem
from lowtide.schedule.base import Schedule, scheduled
from research.needs import need_ortools
from research.orders.common import Windows, better_order, first_order, windows
from research.orders.model import Held, Model, Reuse, Units, handovers, model_of

_LIMIT_UNITS = 2**19  # of a peak: a solver's tolerance of a millionth is then about half a unit
_TOLERANCE = 1e-6
_SOLVERS = ("highs", "scip", "cp-sat")


@dataclass(frozen=True)
class TimeIndexed:
    """Binary variables say which node runs and which tensors are alive at each step; (1) to (6), and with `prune` (7) to (10).

    The paper gives every operator one output that somebody reads, and knows neither reuses nor control edges. Here, beyond it:

    - Tensors have variables of their own, so that nodes make any number of them. One that nobody reads or keeps is part of what its
      node needs beside inputs and outputs (the paper's ES); a kept one is alive at the last step; a donated one was before the first (5).
    - Predecessors that hand over no tensor hand over one of no bytes.
    - A reuse is one more variable for each node and step: it is 0 unless the node runs and a candidate is not alive at the next step.
    - (6) is one constraint for each step, not one for each step and node: as one node runs at a time, the sum over nodes is tighter.
    - (10) is printed with the largest number of descendants of a consumer; the consumer that can run last has the smallest.
    - The peak is a whole number of units between the simple lower bound and the best heuristic's peak, whose order is the solver's hint.

    The bound is the solver's own, less its tolerance, rounded to whole units; where the sizes' common divisor is too small a unit for
    that, sizes are rounded down, and the bound may stay below the optimum. `max_seconds` makes the answer depend on the machine's speed
    where it cuts the solver short. A model of more than `max_variables` is not built: the answer then is the heuristic's.

    Raises ImportError where ortools is not installed, ValueError for an unknown solver.
    """

    solver: Literal["highs", "scip", "cp-sat"] = "highs"
    prune: bool = True
    max_seconds: float = 600.0
    max_variables: int = 500_000

    def __post_init__(self) -> None:
        if self.solver not in _SOLVERS:
            raise ValueError(f"solver: expected one of {', '.join(map(repr, _SOLVERS))}, got {self.solver!r}")
        if not self.max_seconds > 0:
            raise ValueError(f"max_seconds: expected more than 0, got {self.max_seconds}")

    def solve(self, problem: OrderProblem) -> Schedule:
        """The solver's order and bound, or the best heuristic's order where it is no worse. `stats` count variables and constraints."""
        need_ortools(self)
        first = first_order(problem)
        units = Units.of(problem, first.peak_bytes, _LIMIT_UNITS)
        plan = _plan(problem, model_of(problem, units), windows(problem, first.order), self.prune)
        stats = {"variables": plan.variables, "variables_unpruned": plan.variables_unpruned}
        if plan.variables > self.max_variables or problem.node_count == 0:
            return scheduled(problem, first.order, self, bound_bytes=first.lower_bound_bytes, stats=stats)
        program = _Program(plan, units.range_of(first.lower_bound_bytes, first.peak_bytes))
        stats["constraints"] = program.constraints
        if first.status is Status.OPTIMAL:
            return scheduled(problem, first.order, self, bound_bytes=first.lower_bound_bytes, stats=stats)
        solution, least_units = program.solve(self.solver, self.max_seconds, first.order)
        order = better_order(problem, solution, first) if solution else first.order
        return scheduled(problem, order, self, bound_bytes=units.bytes_of(least_units), stats=stats)


class _Plan(NamedTuple):
    """Which variables there are: the steps, from first to last, at which each may be other than 0."""

    model: Model
    tensors: tuple[Held, ...]  # the model's, and those of no bytes that stand for predecessors
    node_steps: tuple[range, ...]  # [n]
    held_steps: tuple[range, ...]  # [held]
    reuses: tuple[Reuse, ...]  # those that depend on the order

    @property
    def variables(self) -> int:
        """How many variables the program has, the peak among them."""
        spans = (*self.node_steps, *self.held_steps, *(self.node_steps[reuse.node] for reuse in self.reuses))
        return 1 + sum(map(len, spans))

    @property
    def variables_unpruned(self) -> int:
        """How many it has with all steps for all."""
        return 1 + len(self.node_steps) * (len(self.node_steps) + len(self.held_steps) + len(self.reuses))


def _plan(problem: OrderProblem, model: Model, when: Windows, prune: bool) -> _Plan:
    n, tensors = problem.node_count, (*model.tensors, *(Held(-1, 0, node, waiting, False) for node, waiting in handovers(problem)))
    first, last = when.first.tolist(), when.last.tolist()
    reuses = tuple(reuse for reuse in model.reuses if not reuse.certain)
    if not prune:
        return _Plan(model, tensors, (range(n),) * n, (range(n),) * len(tensors), reuses)
    node_steps = tuple(range(first[node], last[node] + 1) for node in range(n))  # (7), (9)
    held_steps = tuple(
        range(first[item.producer] if item.producer >= 0 else 0, n if item.kept else 1 + max(last[reader] for reader in item.readers))
        for item in tensors
    )  # (8), (10)
    return _Plan(model, tensors, node_steps, held_steps, reuses)


class _Span(NamedTuple):
    """Variables by step; 0 outside."""

    steps: range
    variables: list[Any]

    def terms(self, step: int, factor: int = 1) -> list[tuple[Any, int]]:
        """The variable of a step and its factor; nothing where it is 0."""
        return [(self.variables[step - self.steps.start], factor)] if step in self.steps else []

    def items(self) -> Iterable[tuple[int, Any]]:
        """Steps and their variables."""
        return zip(self.steps, self.variables, strict=True)


class _Program:
    """The integer program in MathOpt."""

    def __init__(self, plan: _Plan, peak_range: tuple[int, int]) -> None:
        from ortools.math_opt.python import mathopt

        self.programopt: Any = mathopt
        self.program: Any = mathopt.Model()
        self.n = len(plan.node_steps)
        self.runs = [self._span(steps) for steps in plan.node_steps]
        self.alive = [self._span(steps) for steps in plan.held_steps]
        self.takes = [self._span(self.runs[reuse.node].steps) for reuse in plan.reuses]
        self.peak = self.program.add_integer_variable(lb=peak_range[0], ub=peak_range[1])
        self._one_at_a_time()
        for item, alive in zip(plan.tensors, self.alive, strict=True):
            self._life(item, alive)
        position = {item.tensor: index for index, item in enumerate(plan.tensors)}
        for reuse, takes in zip(plan.reuses, self.takes, strict=True):
            self._reuse(self.runs[reuse.node], takes, [self.alive[position[tensor]] for tensor, _ in reuse.rivals])
        self._footprint(plan)
        self.program.minimize(self.peak)

    @property
    def constraints(self) -> int:
        """How many there are, bounds of single variables not counted."""
        return int(self.program.get_num_linear_constraints())

    def solve(self, solver: str, max_seconds: float, hint: Sequence[int]) -> tuple[list[int], int]:
        """The order found, empty where none was, and the units that every order has at its peak."""
        mathopt = self.programopt
        kind = {"highs": mathopt.SolverType.HIGHS, "scip": mathopt.SolverType.GSCIP, "cp-sat": mathopt.SolverType.CP_SAT}[solver]
        parameters = mathopt.SolveParameters(
            time_limit=timedelta(seconds=max_seconds),
            random_seed=0,
            threads=None if solver == "highs" else 1,  # HiGHS refuses to be told, and takes one
            relative_gap_tolerance=0.0,
            absolute_gap_tolerance=0.1,  # the objective is a whole number
        )
        guess = {variable: float(hint[step] == node) for node, run in enumerate(self.runs) for step, variable in run.items()}
        hints = mathopt.ModelSolveParameters(solution_hints=[mathopt.SolutionHint(variable_values=guess)])
        result = mathopt.solve(self.program, kind, params=parameters, model_params=hints)
        dual = result.termination.objective_bounds.dual_bound
        least = math.ceil(dual - _TOLERANCE * abs(dual) - 1e-3) if math.isfinite(dual) else 0
        return (self._order(result) if result.has_primal_feasible_solution() else []), max(0, least)

    def _order(self, result: Any) -> list[int]:
        """Nodes by the step at which their variable is nearest to 1."""
        steps = [run.steps[max(range(len(run.steps)), key=result.variable_values(run.variables).__getitem__)] for run in self.runs]
        return sorted(range(self.n), key=steps.__getitem__)

    def _span(self, steps: range) -> _Span:
        return _Span(steps, [self.program.add_binary_variable() for _ in steps])

    def _add(self, terms: Iterable[tuple[Any, int]], least: float, most: float) -> None:
        """least <= terms <= most; no variable stands in two terms."""
        constraint = self.program.add_linear_constraint(lb=least, ub=most)
        for variable, factor in terms:
            constraint.set_coefficient(variable, factor)

    def _one_at_a_time(self) -> None:
        """(1) and (2)."""
        for terms in self._by_step((run, 1) for run in self.runs):
            self._add(terms, 1, 1)
        for run in self.runs:
            self._add(((variable, 1) for variable in run.variables), 1, 1)

    def _life(self, item: Held, alive: _Span) -> None:
        """(3): alive where it is read; (4), (5): alive only if it was at the step before or is made now."""
        for reader in item.readers:
            for step, run in self.runs[reader].items():
                self._add([(run, 1), *alive.terms(step, -1)], -math.inf, 0)
        for step, now in alive.items():
            if step == 0 and item.producer < 0:
                continue
            runs = self.runs[item.producer].terms(step, -1) if item.producer >= 0 else []
            self._add([(now, 1), *alive.terms(step - 1, -1), *runs], -math.inf, 0)
        if item.kept:
            alive.variables[-1].lower_bound = 1.0

    def _reuse(self, runs: _Span, takes: _Span, candidates: Sequence[_Span]) -> None:
        """Only where the node runs, and some candidate is not alive at the next step."""
        for (step, run), (_, take) in zip(runs.items(), takes.items(), strict=True):
            self._add([(take, 1), (run, -1)], -math.inf, 0)
            surviving = [term for candidate in candidates for term in candidate.terms(step + 1)]
            self._add([(take, 1), *surviving], -math.inf, len(candidates))

    def _footprint(self, plan: _Plan) -> None:
        """(6)."""
        own_units = list(plan.model.own_units)
        for reuse in plan.model.reuses:
            own_units[reuse.node] -= reuse.units * reuse.certain
        sizes = [*own_units, *(item.units for item in plan.tensors), *(-reuse.units for reuse in plan.reuses)]
        for terms in self._by_step(zip((*self.runs, *self.alive, *self.takes), sizes, strict=True)):
            self._add([(self.peak, -1), *terms], -math.inf, 0)

    def _by_step(self, spans: Iterable[tuple[_Span, int]]) -> list[list[tuple[Any, int]]]:
        """[n] the variables of each step, each with its span's factor; those of factor 0 are left out."""
        terms: list[list[tuple[Any, int]]] = [[] for _ in range(self.n)]
        for span, factor in spans:
            for step, variable in span.items() if factor else ():
                terms[step].append((variable, factor))
        return terms
