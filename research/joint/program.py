"""MODeL's integer program, built in ortools' MathOpt. Numbers in brackets are the paper's equations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from typing import Any, NamedTuple

from research.joint.spans import Spans
from research.joint.tensors import Taking, Tensor, Tensors

_TOLERANCE = {"cp-sat": 0.0, "highs": 1e-6, "scip": 1e-6}
SOLVERS = tuple(_TOLERANCE)

Term = tuple[Any, float]


class Span(NamedTuple):
    """Variables by step; 0 outside."""

    steps: range
    variables: list[Any]

    def at(self, step: int, factor: float = 1) -> list[Term]:
        """The variable of a step and its factor; nothing where it is 0."""
        return [(self.variables[step - self.steps.start], factor)] if step in self.steps else []

    def items(self) -> Iterator[tuple[int, Any]]:
        """Steps and their variables."""
        return zip(self.steps, self.variables, strict=True)


@dataclass(frozen=True)
class Plan:
    """Which variables there are."""

    tensors: Tensors
    spans: Spans
    pairs: tuple[tuple[int, int], ...]  # of tensors that have bytes and may meet
    most_units: int  # M: no best arena is larger
    least_units: int  # no arena is smaller
    cut: bool  # whether peak_mem is held above what is alive at each step

    @classmethod
    def of(cls, tensors: Tensors, spans: Spans, units: tuple[int, int], *, addresses: bool, prune: bool, cut: bool) -> Plan:
        """`units` are the least and the most that an arena can have; without addresses there are no pairs, and always the cut."""
        bulky = [number for number, tensor in enumerate(tensors.all) if tensor.units] if addresses else []
        pairs = [pair for pair in combinations(bulky, 2) if not (prune and spans.apart(tensors.all[pair[0]], tensors.all[pair[1]]))]
        return cls(tensors, spans, tuple(pairs), units[1], units[0], cut or not addresses)

    @property
    def size(self) -> int:
        """The variables by step, and the constraints of (6), which are the most: what decides whether the program can be built."""
        spans = self.spans
        steps = sum(len(spans.runs(node)) for node in range(len(spans.asap))) + sum(len(spans.preserved(each)) for each in self.tensors.all)
        return steps + sum(len(self.meeting(*pair)) for pair in self.pairs)

    def meeting(self, one: int, other: int) -> range:
        """The steps at which both of two tensors can be in memory."""
        first, second = (self.spans.alive(self.tensors.all[each]) for each in (one, other))
        return range(max(first.start, second.start), min(first.stop, second.stop))


@dataclass(frozen=True)
class Answer:
    """What a solver says: not to be trusted before it was checked."""

    runs: tuple[tuple[int, ...], ...] = ()  # by step: the nodes that run; empty where nothing was found
    address: tuple[float, ...] = ()  # by tensor, in units; empty without addresses
    least_units: int = 0  # no arena has fewer


@dataclass(frozen=True)
class Limits:
    """How long a solver may take."""

    solver: str
    max_effort: float
    max_nodes: int
    max_seconds: float


class Program:
    """(1) to (9), with what `Plan` leaves of (10) to (12)."""

    def __init__(self, plan: Plan, addresses: bool) -> None:
        from ortools.math_opt.python import mathopt

        self.programopt: Any = mathopt
        self.program: Any = mathopt.Model()
        self.plan, self.tensors = plan, plan.tensors.all
        self.n = len(plan.spans.asap)
        self.runs = [self._span(plan.spans.runs(node)) for node in range(self.n)]  # C, one for all that a node makes: (5)
        self.preserved = [self._span(plan.spans.preserved(each)) for each in self.tensors]  # P
        self.takes = {taking: [self._span(plan.spans.runs(taking.node)) for _ in taking.candidates] for taking in plan.tensors.takings}
        self.peak = self.program.add_integer_variable(lb=plan.least_units, ub=plan.most_units)
        self._order()
        for number, tensor in enumerate(self.tensors):
            self._life(number, tensor)
        for taking, takes in self.takes.items():
            self._taking(taking, takes)
        self.alive = [self._alive(number) for number in range(len(self.tensors))]
        if plan.cut:
            self._cut()
        self.multiple = [self._address(tensor) for tensor in self.tensors] if addresses else []
        if addresses:
            self._addresses()
        self.program.minimize(self.peak)  # (9)

    @property
    def constraints(self) -> int:
        """How many there are, bounds of single variables not counted."""
        return int(self.program.get_num_linear_constraints())

    @property
    def variables(self) -> int:
        """How many there are."""
        return int(self.program.get_num_variables())

    def solve(self, limits: Limits, hint: Mapping[int, int], address: Sequence[int]) -> Answer:
        """`hint` is a known order as the step of each node, `address` the units at which its tensors lie."""
        mathopt = self.programopt
        kinds = {"cp-sat": mathopt.SolverType.CP_SAT, "highs": mathopt.SolverType.HIGHS, "scip": mathopt.SolverType.GSCIP}
        guess = {variable: float(hint[node] == step) for node, run in enumerate(self.runs) for step, variable in run.items()}
        guess |= {variable: float(at // self.plan.tensors.align_units) for variable, at in zip(self.multiple, address, strict=False)}
        hints = mathopt.ModelSolveParameters(solution_hints=[mathopt.SolutionHint(variable_values=guess)])
        result = mathopt.solve(self.program, kinds[limits.solver], params=_parameters(mathopt, limits), model_params=hints)
        least = _least(result.termination.objective_bounds.dual_bound, _TOLERANCE[limits.solver])
        if not result.has_primal_feasible_solution():
            return Answer(least_units=least)
        runs: list[list[int]] = [[] for _ in range(self.n)]
        for node, run in enumerate(self.runs):
            values = result.variable_values(run.variables)
            runs[run.steps[max(range(len(values)), key=values.__getitem__)]].append(node)
        at = [value * self.plan.tensors.align_units for value in result.variable_values(self.multiple)]
        return Answer(tuple(map(tuple, runs)), tuple(at), least)

    def _span(self, steps: range) -> Span:
        return Span(steps, [self.program.add_binary_variable() for _ in steps])

    def _add(self, terms: Iterable[Term], least: float, most: float) -> None:
        """least <= terms <= most; a variable may stand in several terms."""
        factors: dict[Any, float] = {}
        for variable, factor in terms:
            factors[variable] = factors.get(variable, 0) + factor
        constraint = self.program.add_linear_constraint(lb=least, ub=most)
        for variable, factor in factors.items():
            constraint.set_coefficient(variable, factor)

    def _order(self) -> None:
        """(3): every node runs once; and at each of the n steps, one does."""
        for run in self.runs:
            self._add(((variable, 1) for variable in run.variables), 1, 1)
        for step in range(self.n):
            self._add((term for run in self.runs for term in run.at(step)), 1, 1)

    def _life(self, number: int, tensor: Tensor) -> None:
        preserved, runs = self.preserved[number], self.runs[tensor.node] if tensor.node >= 0 else Span(range(0), [])
        sure = self.plan.spans.surely_preserved(tensor)
        for step, now in preserved.items():
            if step in sure:
                now.lower_bound = 1.0  # (12)
            if tensor.node >= 0:
                self._add([(now, 1), *runs.at(step)], -math.inf, 1)  # (1)
            if step > 0 or tensor.node >= 0:
                self._add([(now, 1), *preserved.at(step - 1, -1), *runs.at(step - 1, -1)], -math.inf, 0)  # (2)
        for sink in tensor.sinks:
            for step, run in self.runs[sink].items():
                self._add([(run, 1), *preserved.at(step, -1)], -math.inf, 0)  # (4)
        if tensor.kept:
            self._add([*preserved.at(self.n - 1), *runs.at(self.n - 1)], 1, 1)

    def _taking(self, taking: Taking, takes: Sequence[Span]) -> None:
        """Where the node runs, it takes over from the first candidate that is not preserved at the next step, and from no other."""
        for candidate in taking.candidates:
            self._dies_in_time(candidate)
        for step, run in self.runs[taking.node].items():
            for rank, (candidate, take) in enumerate(zip(taking.candidates, takes, strict=True)):
                (now,) = take.at(step)
                after = self.preserved[candidate].at(step + 1)
                self._add([now, (run, -1)], -math.inf, 0)
                self._add([now, *after], -math.inf, 1)
                for earlier in taking.candidates[:rank]:
                    self._add([now, *((preserved, -1) for preserved, _ in self.preserved[earlier].at(step + 1))], -math.inf, 0)
                self._add([*(term for other in takes for term in other.at(step)), (run, -1), *after], 0, math.inf)

    def _dies_in_time(self, number: int) -> None:
        """Preserved only while somebody has yet to read it: else a node could be kept from taking over."""
        for step, now in self.preserved[number].items():
            runs = [self.runs[sink] for sink in self.tensors[number].sinks]
            later = [(variable, -1.0) for run in runs for when, variable in run.items() if when >= step]
            self._add([(now, 1), *later], -math.inf, 0)

    def _alive(self, number: int) -> dict[int, list[Term]]:
        """live of (6), by step: C + P, less where another tensor has taken over."""
        tensor = self.tensors[number]
        takes = [spans[taking.candidates.index(number)] for taking, spans in self.takes.items() if number in taking.candidates]
        return {
            step: [
                *(self.runs[tensor.node].at(step) if tensor.node >= 0 else []),
                *self.preserved[number].at(step),
                *(term for take in takes for term in take.at(step, -1)),
            ]
            for step in self.plan.spans.alive(tensor)
        }

    def _cut(self) -> None:
        """peak_mem is no less than what is alive at a step: implied by (6) to (8), but not once binary variables are fractions."""
        for step in range(self.n):
            terms = [
                (variable, factor * tensor.units)
                for tensor, alive in zip(self.tensors, self.alive, strict=True)
                for variable, factor in (alive.get(step, ()) if tensor.units else ())
            ]
            self._add([(self.peak, -1), *terms], -math.inf, 0)

    def _address(self, tensor: Tensor) -> Any:
        """A, in multiples of the alignment."""
        return self.program.add_integer_variable(lb=0, ub=max(0, self.plan.most_units - tensor.units) // self.plan.tensors.align_units)

    def _addresses(self) -> None:
        align, most = self.plan.tensors.align_units, self.plan.most_units
        for tensor, at in zip(self.tensors, self.multiple, strict=True):
            if tensor.units:
                self._add([(at, align), (self.peak, -1)], -math.inf, -tensor.units)  # (8)
        for one, other in self.plan.pairs:
            self._pair(one, other)
        for taking, takes in self.takes.items():
            for candidate, take in zip(taking.candidates, takes, strict=True):
                taken = [(variable, float(most)) for variable in take.variables]
                apart = [(self.multiple[taking.output], align), (self.multiple[candidate], -align)]
                self._add([*apart, *taken], -math.inf, most)  # where it takes over, the address is the same
                self._add([*apart, *((variable, -factor) for variable, factor in taken)], -most, math.inf)

    def _pair(self, one: int, other: int) -> None:
        """(6), (7a), (7b)."""
        align, most = self.plan.tensors.align_units, self.plan.most_units
        below, above = self.program.add_binary_variable(), self.program.add_binary_variable()  # a, b
        self._add([(below, 1), (above, 1)], -math.inf, 1)
        for step in self.plan.meeting(one, other):
            live = [*self.alive[one].get(step, ()), *self.alive[other].get(step, ())]
            self._add([(below, 1), (above, 1), *((variable, -factor) for variable, factor in live)], -1, math.inf)
        apart = [(self.multiple[one], align), (self.multiple[other], -align)]
        self._add([*apart, (below, most)], -math.inf, most - self.tensors[one].units)
        self._add([*apart, (above, -most)], self.tensors[other].units - most, math.inf)


def _parameters(mathopt: Any, limits: Limits) -> Any:
    """One thread, a fixed seed, and an end by effort: deterministic time for CP-SAT, nodes of the search tree for the others."""
    common = {
        "time_limit": timedelta(seconds=limits.max_seconds),
        "relative_gap_tolerance": 0.0,
        "absolute_gap_tolerance": 0.1,  # the objective is a whole number
    }
    if limits.solver != "cp-sat":
        # HiGHS refuses to be told its threads, and takes one.
        threads = None if limits.solver == "highs" else 1
        return mathopt.SolveParameters(**common, random_seed=0, node_limit=limits.max_nodes, threads=threads)
    from ortools.sat import sat_parameters_pb2

    effort = sat_parameters_pb2.SatParameters(max_deterministic_time=limits.max_effort, num_workers=1)
    return mathopt.SolveParameters(**common, random_seed=0, cp_sat=effort)


def _least(dual: float, tolerance: float) -> int:
    """The whole units that a solver's bound says, less its tolerance."""
    return max(0, math.ceil(dual - tolerance * abs(dual) - 1e-3)) if math.isfinite(dual) else 0
