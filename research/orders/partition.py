"""Orders made of parts: split where every order must pass, or where it is cheap to pass.

A *waist* is a node that is an ancestor or a descendant of every other. Each order runs all that comes before it, then it, then the
rest, so that parts between waists are ordered one by one and the whole is as good as they are. Where there are no waists,
`Partitioned` cuts at downsets of little live memory, after ICCAD'23 (Zhong et al., section IV.C and Algorithm 2), which forces orders
through them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lowtide.cost.memory import simulate
from lowtide.problems.order import Bytes, OrderProblem
from lowtide.schedule.base import Schedule, Solver, scheduled
from lowtide.schedule.beam import Beam
from lowtide.schedule.exact import Exact
from lowtide.schedule.greedy import ReversePostOrder
from lowtide.schedule.repair import OrderLine
from research.orders.live import least_live
from research.orders.repeat import solve_once


@dataclass(frozen=True)
class AtWaists:
    """Splits at waists and solves each part by `inner`, equal parts once; proves what the parts' proofs amount to."""

    inner: Solver = field(default_factory=lambda: Exact(max_states=20_000, first=Beam()))

    def solve(self, problem: OrderProblem) -> Schedule:
        """The parts' orders, one after the other."""
        base = ReversePostOrder("outputs").solve(problem)
        line, footprint_bytes = OrderLine.of(problem, base.order), simulate(problem, base.order).footprint_bytes
        bounds = [0, *(waists(problem, line) + 1).tolist(), problem.node_count]
        parts = [(first, last) for first, last in pairwise(bounds) if last - first > 1]
        order, is_part = line.order.copy(), np.zeros(problem.node_count, np.bool_)
        schedules = solve_once((line.interval(first, last) for first, last in parts), self.inner)
        for (first, last), answer in zip(parts, schedules, strict=True):
            order[first:last] = line.order[first:last][list(answer.order)]
            is_part[first:last] = True
        # A node between two waists that follow each other costs the same in every order.
        alone_bytes = int(footprint_bytes[~is_part].max(initial=0))
        bound_bytes = max([alone_bytes, *(answer.lower_bound_bytes for answer in schedules)])
        return scheduled(problem, order, self, bound_bytes=bound_bytes, stats={"parts": len(parts)})


def waists(problem: OrderProblem, line: OrderLine) -> NDArray[np.intp]:
    """The steps of `line` at which waists run: the same in every order.

    A node is a waist where it alone has no successor among the nodes up to it, and alone has no predecessor among those from it on.
    """
    n = problem.node_count
    first_succ = np.full(n, n, np.int32)
    last_pred = np.full(n, -1, np.int32)
    after = np.repeat(np.arange(n), np.diff(problem.pred_ptr))
    np.minimum.at(first_succ, problem.pred_ids, line.step_of[after])
    np.maximum.at(last_pred, after, line.step_of[problem.pred_ids])
    steps = line.step_of
    open_before = np.zeros(n + 1, np.int64)  # nodes up to a step whose successors all come later
    np.add.at(open_before, steps, 1)
    np.add.at(open_before, first_succ, -1)
    open_after = np.zeros(n + 1, np.int64)  # nodes from a step on whose predecessors all come earlier
    np.add.at(open_after, last_pred + 1, 1)
    np.add.at(open_after, steps + 1, -1)
    return np.flatnonzero((np.cumsum(open_before)[:n] == 1) & (np.cumsum(open_after)[:n] == 1))


@dataclass(frozen=True)
class Partitioned:
    """Cuts a post-order into `parts` and orders those at the peak by `inner`, until the part at the peak is one that it has ordered.

    Cuts lie near equal numbers of nodes: with `naive` exactly there, as the order's topology has it, otherwise at the downset of
    least live memory within half a part, a minimum cut.
    """

    parts: int = 4
    inner: Solver = field(default_factory=lambda: Exact(max_states=20_000, first=Beam()))
    naive: bool = False

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError(f"parts: expected at least 1, got {self.parts}")

    def solve(self, problem: OrderProblem) -> Schedule:
        """Hot parts as `inner` orders them, cold ones in post-order."""
        base = min((ReversePostOrder(root).solve(problem) for root in ("inputs", "outputs")), key=lambda schedule: schedule.peak_bytes)
        line, bounds = self._cut(problem, OrderLine.of(problem, base.order))
        footprint_bytes, solved = simulate(problem, line.order).footprint_bytes, set[int]()
        order, bound_bytes = line.order.copy(), 0
        while len(solved) < len(bounds) - 1:
            part = _hottest(footprint_bytes, bounds)
            if part in solved:
                break
            first, last = bounds[part], bounds[part + 1]
            solved.add(part)
            schedule = self.inner.solve(line.interval(first, last))
            if len(bounds) == 2:
                bound_bytes = schedule.lower_bound_bytes
            if schedule.peak_bytes < footprint_bytes[first:last].max():
                order[first:last] = line.order[first:last][list(schedule.order)]
                footprint_bytes = simulate(problem, order).footprint_bytes
        return scheduled(problem, order, self, bound_bytes=bound_bytes, stats={"parts": len(bounds) - 1, "hot": len(solved)})

    def _cut(self, problem: OrderProblem, line: OrderLine) -> tuple[OrderLine, list[int]]:
        """An order that runs part after part, each in the order of `line`, and the step at which each starts, with the end."""
        n = problem.node_count
        middles = [n * part // self.parts for part in range(1, self.parts)]
        if self.naive:
            return line, sorted({0, *middles, n})
        part_of, half = np.zeros(n, np.int32), max(1, n // (2 * self.parts))
        for middle in middles:
            done = line.step_of < max(0, middle - half)
            later = line.step_of >= min(n, middle + half)
            part_of += ~least_live(problem, done, later).downset
        sizes = np.bincount(part_of, minlength=self.parts)
        order = np.lexsort((line.step_of, part_of)).astype(np.int32)
        return OrderLine.of(problem, order), sorted({0, *np.cumsum(sizes).tolist()})


def _hottest(footprint_bytes: Bytes, bounds: list[int]) -> int:
    """The first part at the peak."""
    return int(np.searchsorted(np.array(bounds), footprint_bytes.argmax(), side="right")) - 1
