"""Rectangles in time and addresses that do not overlap, solved by ortools' CP-SAT: a reference solver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowtide.placement.base import Placement
from lowtide.problems.placement import FREE, PlaceProblem
from research.addresses.common import Found, Model, answered, first_placement, is_answer
from research.cp_sat import check_settings, solve
from research.needs import need_ortools

_LIMIT_UNITS = 2**35  # of an arena: CP-SAT adds up areas, units times events, in int64


@dataclass(frozen=True)
class Rectangles:
    """A buffer is a rectangle whose place in time is given and whose address is sought; `no_overlap_2d` keeps them apart.

    The best heuristic's offsets are the hint, and its arena the upper bound. Under a capacity there is nothing to make smaller: the
    first placement found is the answer.

    `max_effort` is CP-SAT's deterministic time, about a second a unit: the same effort gives the same answer on every machine, with
    several `workers` too. `max_seconds` is only a cap. A problem of more than `max_buffers` gets the heuristic's answer.

    Raises ImportError where ortools is not installed.
    """

    max_effort: float = 60.0
    max_seconds: float = 600.0
    workers: int = 1
    max_buffers: int = 5_000

    def __post_init__(self) -> None:
        check_settings(self)

    def place(self, problem: PlaceProblem, capacity_bytes: int | None = None) -> Placement:
        """The solver's placement and bound, or the best heuristic's where it is no worse. `stats` count the model and its branches."""
        need_ortools(self)
        first = first_placement(problem, capacity_bytes)
        model = Model.of(problem, first.arena_bytes, _LIMIT_UNITS)
        if is_answer(first, capacity_bytes) or len(model.buffers) > self.max_buffers:
            return answered(problem, self, model, first, Found(), capacity_bytes)
        program = _Program(model, first, capacity_bytes)
        return answered(problem, self, model, first, program.solve(self), capacity_bytes)


class _Program:
    """The rectangles in CP-SAT."""

    def __init__(self, model: Model, first: Placement, capacity_bytes: int | None) -> None:
        from ortools.sat.python import cp_model

        self.program: Any = cp_model.CpModel()
        self.question = capacity_bytes is not None
        self.most = (first.arena_bytes if capacity_bytes is None else capacity_bytes) // model.unit_bytes
        self.hints = [first.offsets[buffer] // model.unit_bytes for buffer in model.buffers.tolist()]
        self.address = [self._address(model, each) for each in range(len(model.buffers))]
        self._apart(model)
        if not self.question:
            self.arena = self.program.new_int_var(first.lower_bound_bytes // model.unit_bytes, self.most, "arena")
            for address, size in zip(self.address, model.size.tolist(), strict=True):
                self.program.add(address + size <= self.arena)
            self.program.minimize(self.arena)

    def solve(self, settings: Rectangles) -> Found:
        """What CP-SAT finds and proves within its effort."""
        solved = solve(self.program, settings, is_question=self.question)
        effort = {"variables": len(self.program.proto.variables), **solved.effort}
        if solved.is_infeasible:
            return Found(least_units=self.most + 1, stats=effort)
        offsets = tuple(solved.solver.value(address) for address in self.address) if solved.is_found else None
        return Found(offsets, solved.least, effort)

    def _address(self, model: Model, each: int) -> Any:
        """Where the buffer starts, as an expression: a multiple of its alignment."""
        size, align, fixed = int(model.size[each]), int(model.align[each]), int(model.fixed[each])
        if fixed != FREE:
            return self.program.new_constant(fixed)
        multiple = self.program.new_int_var(0, max(0, self.most - size) // align, f"address{each}")
        if not self.question:
            self.program.add_hint(multiple, self.hints[each] // align)
        return multiple * align

    def _apart(self, model: Model) -> None:
        lives, places = [], []
        for each, size in enumerate(model.size.tolist()):
            if size:  # less than a unit can be in nobody's way
                start, end = int(model.start[each]), int(model.end[each])
                lives.append(self.program.new_fixed_size_interval_var(start, end - start, f"life{each}"))
                places.append(self.program.new_fixed_size_interval_var(self.address[each], size, f"place{each}"))
        self.program.add_no_overlap_2d(lives, places)
