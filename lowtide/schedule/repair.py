"""Repair of an order around its peak: a window of steps is ordered anew, all others stay, until no window improves.

What a window costs depends only on which nodes run before it, so it is an ordering problem of its own, small enough for an
exact solver where the whole is not. Minimum cuts say when to stop: where one meets the peak, no order is better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowtide.cost.memory import checked_order, simulate
from lowtide.problems import Status
from lowtide.problems.order import Bytes, Ints, OrderProblem, Rows, frozen, offsets
from lowtide.schedule.base import Anytime, Schedule, Solver, scheduled
from lowtide.schedule.beam import Beam
from lowtide.schedule.best import Best
from lowtide.schedule.cuts import cut_bound_bytes
from lowtide.schedule.exact import Exact

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, eq=False)
class OrderLine:
    """An order of a problem's n nodes, laid out so that each part of it is found in the time that the part takes."""

    problem: OrderProblem
    order: Ints  # [n]
    step_of: Ints  # [n] by node
    made_step: Ints  # [m] the step that makes each tensor, -1 where it is there from the start
    last_step: Ints  # [m] the last step that reads it, n where it is kept, -1 where nobody reads it
    live_bytes: Bytes  # [n + 1] before each step and after the last, without what is resident

    @classmethod
    def of(cls, problem: OrderProblem, order: ArrayLike) -> OrderLine:
        """Raises CheckError unless `order` is a topological order."""
        steps, n = checked_order(problem, order), problem.node_count
        step_of = np.empty(n, np.int32)
        step_of[steps] = np.arange(n, dtype=np.int32)
        made_step = np.append(step_of, np.int32(-1))[problem.producer]
        last_step = np.full(problem.tensor_count, -1, np.int32)
        tensor_of = np.repeat(np.arange(problem.tensor_count), np.diff(problem.readers.ptr))
        np.maximum.at(last_step, tensor_of, step_of[problem.readers.ids])
        last_step[problem.kept] = n
        change = np.zeros(n + 2, np.int64)
        used = problem.uses > 0
        np.add.at(change, made_step[used] + 1, problem.tensor_bytes[used])
        np.add.at(change, last_step[used] + 1, -problem.tensor_bytes[used])
        return cls(problem, steps, step_of, made_step, last_step, np.cumsum(change)[: n + 1])

    def interval(self, first: int, last: int) -> OrderProblem:
        """The problem of steps `first` to `last` - 1 alone; node i of it is `order[first + i]`, so that its order as written is this one.

        Every order of them has the footprints that it has as that part of the order: what lives throughout is resident, what later
        steps read is kept, what nobody else reads any more is there from the start.
        """
        problem, nodes = self.problem, self.order[first:last]
        reads, outputs = problem.reads.chosen(nodes), problem.outputs_of.chosen(nodes)
        dying = reads.ids[(self.made_step[reads.ids] < first) & (self.last_step[reads.ids] < last)]
        local = np.unique(np.concatenate([outputs.ids, dying]))
        lasting, is_here = self.last_step[local] >= last, self.made_step[local] >= first
        takes = problem.takes.chosen(nodes)
        taken, may_take = _positions(takes, local)
        may_take &= self.last_step[takes.ids] < last
        chosen = _chosen(takes, taken, may_take)
        before = problem.preds.chosen(nodes)
        throughout = int(self.live_bytes[first]) - int(problem.tensor_bytes[local[~is_here]].sum())
        output_place = np.searchsorted(local, problem.take_output[nodes])
        read = _chosen(reads, *_positions(reads, local))
        pred = _sorted(_chosen(before, self.step_of[before.ids] - first, self.step_of[before.ids] >= first))
        return OrderProblem(
            names=tuple(problem.names[node] for node in nodes),
            tensor_bytes=frozen(problem.tensor_bytes[local]),
            producer=frozen(np.where(is_here, self.made_step[local] - first, -1).astype(np.int32)),
            kept=frozen(lasting & is_here),
            read_ptr=read.ptr,
            read_ids=read.ids,
            pred_ptr=pred.ptr,
            pred_ids=pred.ids,
            workspace_bytes=frozen(problem.workspace_bytes[nodes]),
            take_ptr=chosen.ptr,
            take_ids=chosen.ids,
            take_slots=frozen(Rows(problem.take_ptr, problem.take_slots).chosen(nodes).ids[may_take]),
            take_output=frozen(np.where(np.diff(chosen.ptr) > 0, output_place, -1).astype(np.int32)),
            resident_bytes=problem.resident_bytes + throughout,
        )

    def replaced(self, order: Ints, first: int, inner: ArrayLike) -> Ints:
        """`order`, which is this one but for other steps, with those from `first` on as `inner` orders them as an interval."""
        positions, put = np.asarray(inner, np.int32), order.copy()
        put[first : first + len(positions)] = self.order[first + positions]
        return put


def _positions(rows: Rows, local: Ints) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """By entry: its position in `local`, which is ascending, and whether it has one."""
    position = np.searchsorted(local, rows.ids)
    return position, np.append(local, np.int32(-1))[position] == rows.ids


def _chosen(rows: Rows, position: NDArray[np.integer[Any]], keep: NDArray[np.bool_]) -> Rows:
    return Rows(frozen(offsets(keep)[rows.ptr]), frozen(position[keep].astype(np.int32)))


def _sorted(rows: Rows) -> Rows:
    row_of = np.repeat(np.arange(len(rows.ptr) - 1), np.diff(rows.ptr))
    return Rows(rows.ptr, frozen(rows.ids[np.lexsort((rows.ids, row_of))]))


@dataclass(frozen=True)
class Repair(Anytime):
    """Improves the order of `first` by windows of up to `largest` steps around its peak, each ordered by `inner`.

    A window starts at `window` steps and doubles while it does not help. Each look at a long order is at several of its highest places,
    far from each other, as all that is linear in the problem then serves them all. `max_windows` for each of these places, the moves that
    `inner` makes in all of them, and `max_cuts` cap the effort.
    """

    inner: Solver = field(default_factory=lambda: Exact(max_states=20_000, first=Beam()))
    first: Solver = field(default_factory=Best)
    window: int = 32
    largest: int = 1024
    max_windows: int = 200
    max_moves: int = 1_000_000_000
    max_cuts: int = 64

    def __post_init__(self) -> None:
        if not 2 <= self.window <= self.largest:
            raise ValueError(f"expected 2 <= window <= largest, got window {self.window} and largest {self.largest}")

    def answers(self, problem: OrderProblem) -> Iterator[Schedule]:
        """The first solver's order with the bound of cuts, and each lower peak that windows lead to."""
        given = self.first.solve(problem)
        if given.status is Status.INFEASIBLE:
            yield given
            return
        order = np.array(given.order, np.int32)
        bound_bytes = max(given.lower_bound_bytes, self._bound_bytes(problem, order))
        best = scheduled(problem, order, self, bound_bytes=bound_bytes, stats={"windows": 0})
        yield best
        places = 1 + problem.node_count // _STEPS_A_PLACE
        windows, moves, stuck = 0, 0, False
        while not stuck and windows < places * self.max_windows and moves < self.max_moves and best.status is Status.FEASIBLE:
            footprint_bytes, line, stuck = simulate(problem, order).footprint_bytes, OrderLine.of(problem, order), True
            for place, step in enumerate(highest_steps(footprint_bytes, self.largest, places, bound_bytes)):
                repaired = self._mended(line, footprint_bytes, step, self.max_moves - moves)
                windows, moves = windows + repaired.windows, moves + repaired.moves
                if repaired.size >= problem.node_count:  # the window is the problem
                    bound_bytes = max(bound_bytes, repaired.bound_bytes)
                if repaired.order is not None:
                    order, stuck = line.replaced(order, repaired.first, repaired.order), stuck and place > 0
                if moves >= self.max_moves:
                    break
            later = scheduled(problem, order, self, bound_bytes=bound_bytes, stats={"windows": windows})
            if later.peak_bytes < best.peak_bytes:
                best = later
                yield best
        if windows and best.status is Status.FEASIBLE:  # a better order has its highest steps elsewhere
            bound_bytes = max(bound_bytes, self._bound_bytes(problem, order))
        if bound_bytes > best.lower_bound_bytes:
            yield scheduled(problem, order, self, bound_bytes=bound_bytes, stats={"windows": windows})

    def _mended(self, line: OrderLine, footprint_bytes: Bytes, step: int, max_moves: int) -> _Mended:
        """The smallest window around a step, each twice the one before, that can be ordered with a lower peak."""
        n, size, windows, moves = len(line.order), self.window, 0, 0
        while True:
            first = max(0, min(step - size // 2, n - size))
            last = min(first + size, n)
            repaired = self.inner.solve(line.interval(first, last))
            windows, moves = windows + 1, moves + repaired.stats.get("moves", 0)
            better = repaired.status is not Status.INFEASIBLE and repaired.peak_bytes < footprint_bytes[first:last].max()
            if better or size >= min(self.largest, n) or moves >= max_moves:
                return _Mended(first, repaired.order if better else None, size, repaired.lower_bound_bytes, windows, moves)
            size *= 2

    def _bound_bytes(self, problem: OrderProblem, order: Ints) -> int:
        return cut_bound_bytes(problem, order, max_cuts=self.max_cuts).bound_bytes


_STEPS_A_PLACE = 4096


class _Mended(NamedTuple):
    """What was found for one place of an order."""

    first: int  # where the window starts
    order: tuple[int, ...] | None  # of the window's steps, None where no window helped
    size: int  # of the last window
    bound_bytes: int  # of the last window
    windows: int
    moves: int


def highest_steps(footprint_bytes: Bytes, apart: int, most: int, above_bytes: int) -> list[int]:
    """The highest step of each of so many stretches of `apart` steps, no two of them neighbours, above so many bytes; the highest first."""
    highest = np.maximum.reduceat(footprint_bytes, np.arange(0, len(footprint_bytes), apart))
    chosen: list[int] = []
    free = np.ones(len(highest) + 2, np.bool_)
    for stretch in np.argsort(-highest, kind="stable"):
        if highest[stretch] <= above_bytes or len(chosen) == most:
            break
        if free[stretch] and free[stretch + 1] and free[stretch + 2]:
            free[stretch + 1] = False
            chosen.append(int(stretch * apart + np.argmax(footprint_bytes[stretch * apart : (stretch + 1) * apart])))
    return chosen
