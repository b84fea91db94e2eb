"""The interval model, solved by ortools' CP-SAT: a reference solver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.problems import Status
from lowtide.problems.order import OrderProblem
from lowtide.schedule.base import Schedule, scheduled
from research.cp_sat import check_settings, solve
from research.needs import need_ortools
from research.orders.common import Windows, better_order, first_order, windows
from research.orders.model import Held, Reuse, Units, model_of, row

_LIMIT_UNITS = 2**31  # of a peak: then sizes times lifetimes, which CP-SAT adds up in int64, stay far below its limit


@dataclass(frozen=True)
class Intervals:
    """Nodes have positions, all different; tensors are intervals of them, and their sizes add up to at most the peak at every position.

    A node's own needs are an interval of one position. Where its output takes over, the output's interval starts one position later,
    which is allowed if all other readers of some candidate run before. The best heuristic's order is the hint, its peak the upper bound,
    and positions lie within each node's window (ICCAD'23, (7) and (9)).

    `max_effort` is CP-SAT's deterministic time, one to a few seconds a unit: the same effort gives the same answer on every machine, with
    several `workers` too. `max_seconds` is only a cap. A problem of more than `max_nodes` gets the heuristic's answer.

    Raises ImportError where ortools is not installed.
    """

    max_effort: float = 60.0
    max_seconds: float = 600.0
    workers: int = 1
    max_nodes: int = 5_000

    def __post_init__(self) -> None:
        check_settings(self)

    def solve(self, problem: OrderProblem) -> Schedule:
        """The solver's order and bound, or the best heuristic's order where it is no worse. `stats` count the model and its branches."""
        need_ortools(self)
        first = first_order(problem)
        if first.status is Status.OPTIMAL or problem.node_count > self.max_nodes:
            return scheduled(problem, first.order, self, bound_bytes=first.lower_bound_bytes)
        units = Units.of(problem, first.peak_bytes, _LIMIT_UNITS)
        program = _Program(problem, units, first)
        solution, least_units, effort = program.solve(self)
        order = better_order(problem, solution, first) if solution else first.order
        stats = {"variables": program.variables, "constraints": program.constraints, **effort}
        return scheduled(problem, order, self, bound_bytes=units.bytes_of(least_units), stats=stats)


class _Program:
    """The interval model in CP-SAT."""

    def __init__(self, problem: OrderProblem, units: Units, first: Schedule) -> None:
        from ortools.sat.python import cp_model

        self.program: Any = cp_model.CpModel()
        self.n = problem.node_count
        self.model = model_of(problem, units)
        self.rank = {node: step for step, node in enumerate(first.order)}
        self.intervals: list[Any] = []
        self.demands: list[int] = []
        self.position = self._positions(problem, windows(problem, first.order))
        self.start = {reuse.output: self._start(reuse) for reuse in self.model.reuses}  # of outputs that may take over
        for item in self.model.tensors:
            self._life(item)
        self._needs()
        self.peak = self.program.new_int_var(*units.range_of(first.lower_bound_bytes, first.peak_bytes), "peak")
        self.program.add_cumulative(self.intervals, self.demands, self.peak)
        self.program.minimize(self.peak)

    @property
    def variables(self) -> int:
        """How many the model has."""
        return len(self.program.proto.variables)

    @property
    def constraints(self) -> int:
        """How many the model has, intervals among them."""
        return len(self.program.proto.constraints)

    def solve(self, settings: Intervals) -> tuple[list[int], int, dict[str, int]]:
        """The order found, empty where none was; the units that every order has at its peak; and the effort."""
        solved = solve(self.program, settings)
        if not solved.is_found:
            return [], solved.least, solved.effort
        at = [solved.solver.value(position) for position in self.position]
        return sorted(range(self.n), key=at.__getitem__), solved.least, solved.effort

    def _positions(self, problem: OrderProblem, when: Windows) -> list[Any]:
        position = [self.program.new_int_var(int(a), int(b), f"node{node}") for node, (a, b) in enumerate(zip(*when, strict=True))]
        self.program.add_all_different(position)
        for node in range(self.n):
            self.program.add_hint(position[node], self.rank[node])
            for before in row(problem.preds, node):
                self.program.add(position[before] < position[node])
        return position

    def _start(self, reuse: Reuse) -> Any:
        """Where the interval of the node's output starts: one position later where the output takes over."""
        node = reuse.node
        if reuse.certain:
            return self.position[node] + 1
        taken, start = self.program.new_bool_var(f"takes{node}"), self.program.new_int_var(0, self.n, f"start{node}")
        literals = [self._all_before(others, node) for _, others in reuse.rivals]
        self.program.add_at_least_one([taken.negated(), *literals])
        self.program.add(start == self.position[node] + taken)
        can_take = any(self._ran_before(others, node) for _, others in reuse.rivals)
        self.program.add_hint(taken, can_take)
        self.program.add_hint(start, self.rank[node] + can_take)
        return start

    def _all_before(self, others: Sequence[int], node: int) -> Any:
        """A literal that is true only where all others run before the node."""
        literal = self.program.new_bool_var(f"last{node}")
        for other in others:
            self.program.add(self.position[other] < self.position[node]).only_enforce_if(literal)
        self.program.add_hint(literal, self._ran_before(others, node))
        return literal

    def _ran_before(self, others: Sequence[int], node: int) -> bool:
        """Whether they do in the order that is the hint."""
        return all(self.rank[other] < self.rank[node] for other in others)

    def _life(self, item: Held) -> None:
        """From the producer's position, or the one after where it takes over, to after the last reader's, or to the end."""
        start: Any = 0 if item.producer < 0 else self.start.get(item.tensor, self.position[item.producer])
        self._interval(start, self.n if item.kept else self._end(item.readers), item.units)

    def _end(self, readers: Sequence[int]) -> Any:
        """A position after all readers."""
        if len(readers) == 1:
            return self.position[readers[0]] + 1
        end = self.program.new_int_var(1, self.n, "end")
        for reader in readers:
            self.program.add(end > self.position[reader])
        self.program.add_hint(end, 1 + max(self.rank[reader] for reader in readers))
        return end

    def _needs(self) -> None:
        """What nodes need for themselves; of that, an output that nobody reads is not needed where it takes over."""
        tensors = {item.tensor for item in self.model.tensors}
        own_units = list(self.model.own_units)
        for reuse in self.model.reuses:
            if reuse.output not in tensors:
                own_units[reuse.node] -= reuse.units
                self._interval(self.start[reuse.output], self.position[reuse.node] + 1, reuse.units)
        for position, units in zip(self.position, own_units, strict=True):
            self._interval(position, position + 1, units)

    def _interval(self, start: Any, end: Any, units: int) -> None:
        """So many units at the positions `[start, end)`."""
        if units > 0:
            length = self.program.new_int_var(0, self.n, "length")
            self.intervals.append(self.program.new_interval_var(start, length, end, "life"))
            self.demands.append(units)
