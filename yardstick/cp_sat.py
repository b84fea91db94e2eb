"""Recomputation with two runs a node and a given order, by ortools' CP-SAT: answers and bounds that no search of lowtide had a part in.

    python -m yardstick.cp_sat [--instances remat-vgg16-256 ...] [--shares 90 80] [--seconds 60] [--workers 4]

Stage k ends with the first run of node k; second runs lie in stages. Within a stage they may be sorted by number, as numbers are a
topological order, and dependencies still hold.

`Intervals` finds answers, as MOCCASIN does (Bartan et al., ICML 2023, section 3): each run of a node starts an interval over which its
output is retained, all within a grid that has a place for each node in each stage, and the intervals of a moment fit into the limit.

`Moments` proves bounds. It counts the memory at first runs alone, and asks of second runs only that their inputs are there. What it
leaves out are constraints, so that no sequence whatever its order within stages costs less than its bound.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ortools.sat.python import cp_model

from yardstick.check import AnswerError, value_of
from yardstick.engines import Finding
from yardstick.files import SHARES, instance, limits_of
from yardstick.fill import record

SMALL = ("remat-vgg16-256", "remat-vgg19-256", "remat-vgg-unet-32", "remat-fcn8-32", "remat-segnet-32", "remat-random-100")
_UNITS = 2**30  # of the limit: CP-SAT multiplies sizes, and its integers have 64 bits


@dataclass(frozen=True)
class Solver:
    """How far CP-SAT looks."""

    seconds: float = 60.0
    workers: int = 4

    def solve(self, model: cp_model.CpModel) -> tuple[cp_model.CpSolver, int]:
        """The solver, which knows the values, and its status."""
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = self.seconds
        solver.parameters.num_workers = self.workers
        solver.parameters.linearization_level = 2
        return solver, solver.solve(model)


@dataclass(frozen=True, eq=False)
class Twice:
    """A question: a graph whose node i makes tensor i, and a limit."""

    graph: dict[str, Any]
    limit_bytes: int

    @property
    def count(self) -> int:
        return len(self.graph["makes"])

    @property
    def reads(self) -> list[list[int]]:
        return self.graph["reads"]  # type: ignore[no-any-return]

    @property
    def cost(self) -> list[int]:
        return self.graph["cost"]  # type: ignore[no-any-return]

    @property
    def unit_bytes(self) -> int:
        """What divides all sizes; more where numbers would be too large."""
        return max(math.gcd(*self.graph["bytes"]), math.ceil(self.limit_bytes / _UNITS))

    def sizes(self, up: bool) -> tuple[list[int], int]:
        """Sizes and the limit in units: sizes rounded up and the limit down, or the other way."""
        unit = self.unit_bytes
        if up:
            return [-(-each // unit) for each in self.graph["bytes"]], self.limit_bytes // unit
        return [each // unit for each in self.graph["bytes"]], -(-self.limit_bytes // unit)

    def finding(self, answer: list[int] | None, bound: int | None, how: str, seconds: float, possible: bool = True) -> Finding:
        """What was found, as the table takes it."""
        known = None if answer is None else {"sequence": answer}
        return Finding(self.graph["name"], "remat-twice", self.limit_bytes, known, bound, how, seconds, possible)


def moments(twice: Twice, solver: Solver) -> Finding:
    """A bound; and an answer, where the cheapest choice of second runs keeps to the limit when they run sorted."""
    start = time.perf_counter()
    model, count = cp_model.CpModel(), twice.count
    sizes, limit = twice.sizes(up=False)
    again: dict[tuple[int, int], Any] = {}  # node and stage: whether it runs again there
    first: dict[tuple[int, int], Any] = {}  # node and moment: whether the copy of its first run is there at the moment's first run
    second: dict[tuple[int, int], Any] = {}
    for node in range(count):
        for stage in range(node + 1, count):
            again[node, stage], first[node, stage], second[node, stage] = (model.new_bool_var("") for _ in range(3))
        model.add_at_most_one(again[node, stage] for stage in range(node + 1, count))
        for stage in range(node + 1, count):
            if stage > node + 1:
                model.add_implication(first[node, stage], first[node, stage - 1])
            before = [second[node, stage - 1]] if stage > node + 1 else []
            model.add_bool_or([~second[node, stage], again[node, stage], *before])
            model.add_at_most_one(first[node, stage], second[node, stage])
    for stage in range(count):
        for read in twice.reads[stage]:
            model.add_bool_or(first[read, stage], second[read, stage])
        for node in range(stage):
            for read in twice.reads[node]:
                there = [first[read, stage - 1], second[read, stage - 1]] if read < stage - 1 else [True]
                model.add_bool_or([~again[node, stage], again[read, stage], *there])
        held = [sizes[node] * (first[node, stage] + second[node, stage]) for node in range(stage)]
        model.add(sum(held) + sizes[stage] <= limit)
    model.minimize(sum(twice.cost[node] * each for (node, _), each in again.items()))
    solved, status = solver.solve(model)
    how, seconds = f"CP-SAT, moments, {solver}", time.perf_counter() - start
    if status == cp_model.INFEASIBLE:
        return twice.finding(None, None, how, seconds, possible=False)
    bound = sum(twice.cost) + max(0, math.ceil(solved.best_objective_bound - 0.5))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return twice.finding(None, bound, how, seconds)
    chosen = [[node for node in range(stage) if solved.value(again[node, stage])] + [stage] for stage in range(count)]
    return twice.finding([node for stage in chosen for node in stage], bound, how, seconds)


def intervals(twice: Twice, solver: Solver) -> Finding:
    """An answer whose second runs are sorted by number within each stage."""
    start = time.perf_counter()
    model, count = cp_model.CpModel(), twice.count
    sizes, limit = twice.sizes(up=True)
    end_of_time = _place(count - 1, count - 1)
    ends, runs_again, starts, ends_again, retained, demands = [], [], [], [], [], []
    for node in range(count):
        ends.append(model.new_int_var(_place(node, node), end_of_time, ""))
        runs_again.append(model.new_bool_var(""))
        places = [_place(stage, node) for stage in range(node + 1, count)] or [end_of_time]
        starts.append(model.new_int_var_from_domain(cp_model.Domain.from_values(places), ""))
        ends_again.append(model.new_int_var(0, end_of_time, ""))
        model.add(ends_again[node] >= starts[node]).only_enforce_if(runs_again[node])
        model.add(ends[node] < starts[node]).only_enforce_if(runs_again[node])
        if node == count - 1:
            model.add(runs_again[node] == 0)
        length, again_length = model.new_int_var(1, end_of_time + 1, ""), model.new_int_var(0, end_of_time + 1, "")
        retained.append(model.new_interval_var(_place(node, node), length, ends[node] + 1, ""))
        retained.append(model.new_optional_interval_var(starts[node], again_length, ends_again[node] + 1, runs_again[node], ""))
        demands += [sizes[node], sizes[node]]
    for node in range(count):
        for read in twice.reads[node]:
            by_first, by_second = model.new_bool_var(""), model.new_bool_var("")
            model.add(ends[read] >= _place(node, node)).only_enforce_if(by_first)
            _covers(model, _place(node, node), starts[read], ends_again[read], runs_again[read], by_second)
            model.add_bool_or(by_first, by_second)
            by_first, by_second = model.new_bool_var(""), model.new_bool_var("")
            model.add(ends[read] >= starts[node]).only_enforce_if(by_first)
            _covers(model, starts[node], starts[read], ends_again[read], runs_again[read], by_second)
            model.add_bool_or(by_first, by_second, ~runs_again[node])
    model.add_cumulative(retained, demands, limit)
    model.minimize(sum(cost * each for cost, each in zip(twice.cost, runs_again, strict=True)))
    solved, status = solver.solve(model)
    how, seconds = f"CP-SAT, intervals, {solver}", time.perf_counter() - start
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return twice.finding(None, None, f"{how}: {solved.status_name(status).lower()}", seconds)
    runs = [(_place(node, node), node) for node in range(count)]
    runs += [(solved.value(starts[node]), node) for node in range(count) if solved.value(runs_again[node])]
    return twice.finding([node for _, node in sorted(runs)], None, f"{how}: {solved.status_name(status).lower()}", seconds)


def _place(stage: int, node: int) -> int:
    """The time in the grid at which a node runs in a stage."""
    return stage * (stage + 1) // 2 + node


def _covers(model: cp_model.CpModel, at: Any, start: Any, end: Any, runs: Any, if_chosen: Any) -> None:
    """Where it is chosen, the node runs again before a time, and its output is retained up to it."""
    model.add(start < at).only_enforce_if(if_chosen)
    model.add(end >= at).only_enforce_if(if_chosen)
    model.add_implication(if_chosen, runs)


def judged(twice: Twice, finding: Finding) -> Finding:
    """The same, without an answer that is not valid: that of `moments` may need more than the limit within a stage."""
    answer = {"instance": finding.instance, "problem": finding.problem, "limit_bytes": finding.limit_bytes, **(finding.answer or {})}
    try:
        value_of(twice.graph, answer)
    except AnswerError:
        return replace(finding, answer=None)
    return finding


def main() -> None:
    """Both programs on each instance, at each limit; what is better goes into the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", nargs="+", default=list(SMALL), metavar="NAME")
    parser.add_argument("--shares", nargs="+", type=int, default=[90, 80], metavar="PERCENT")
    parser.add_argument("--seconds", type=float, default=Solver.seconds)
    parser.add_argument("--workers", type=int, default=Solver.workers)
    parser.add_argument("--try", dest="tried", action="store_true", help="leave the table alone")
    options = parser.parse_args()
    solver = Solver(options.seconds, options.workers)
    for name in options.instances:
        graph = instance(name)
        for share, limit in zip(SHARES, limits_of(graph), strict=True):
            if share in options.shares:
                twice = Twice(graph, limit)
                report(twice, share, [judged(twice, moments(twice, solver)), judged(twice, intervals(twice, solver))], options.tried)


def report(twice: Twice, share: int, found: Sequence[Finding], tried: bool) -> None:
    """Prints what was found, and has it recorded."""
    for each in found:
        sequence = each.answer["sequence"] if each.answer else None
        value = sum(twice.cost[node] for node in sequence) if sequence else None
        said = "impossible" if not each.possible else f"value {value} bound {each.bound}"
        print(twice.graph["name"], f"{share} %", said, each.how, f"{each.seconds:.1f} s", flush=True)
    if not tried:
        record(twice.graph, found, by="CP-SAT")


if __name__ == "__main__":
    main()
