"""What lowtide's engines answer to an instance, and the bounds that they prove."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from lowtide.placement.auto import Auto as AutoPlacer
from lowtide.placement.auto import place
from lowtide.problems import Status
from lowtide.problems.order import Ints
from lowtide.remat.archive import Archive, Point
from lowtide.remat.bound import TimeBound
from lowtide.remat.local_moves import LocalMoves
from lowtide.remat.problem import RematProblem
from lowtide.remat.pruning import prompt
from lowtide.remat.seeds import Seeds
from lowtide.remat.sweep import Sweep, _SweepSearch
from lowtide.schedule import schedule
from lowtide.schedule.auto import Auto as AutoOrder
from research.addresses.spaces import place_in_spaces
from yardstick.files import limits_of
from yardstick.problems import Instance, order_problem, place_problem, remat_problem, sequence_of, spaced_problem

_SEEDS, _MOVES_A_STATE = 6, 60  # at each limit, as many local moves for each state of the search
TWICE = LocalMoves(most_runs=2, reorders=False)
_SAME = 1e-9  # sums of whole numbers in floats are as near as that


@dataclass(frozen=True)
class Finding:
    """What is known of a question from one run: an answer, a bound, or both."""

    instance: str
    problem: str
    limit_bytes: int | None
    answer: dict[str, Any] | None  # without instance, problem and limit
    bound: int | None
    how: str
    seconds: float
    possible: bool = True  # False where it is proven that no answer keeps to the limit


@dataclass(frozen=True)
class Effort:
    """How far engines look. Seconds only stop them."""

    max_states: int = 6600  # schedules of a search under limits, and states of an exact order
    max_runs: int = 26_000_000
    max_seconds: float = 40.0

    @property
    def sweep(self) -> Sweep:
        """The search under limits."""
        return Sweep(max_states=self.max_states, max_runs=self.max_runs, max_seconds=self.max_seconds)

    def __str__(self) -> str:
        return f"Sweep(max_states={self.max_states}, max_runs={self.max_runs}, max_seconds={self.max_seconds:g})"


def problems_of(instance: Instance) -> tuple[str, ...]:
    """The problems that an instance is asked."""
    if instance["format"] == "yardstick.buffers":
        return ("spaces",) if "spaces" in instance else ("place",)
    if "cost" not in instance:
        return ("order",)
    return ("order", "remat", "offload") if "store" in instance else ("order", "remat", "remat-twice")


def findings(instance: Instance, problem: str, effort: Effort) -> Iterator[Finding]:
    """What lowtide finds for a problem of an instance, at all its limits."""
    start = time.perf_counter()
    if problem == "order":
        schedule_found = schedule(order_problem(instance), AutoOrder(max_seconds=effort.max_seconds))
        answer: dict[str, Any] = {"sequence": [int(node) for node in schedule_found.order]}
        bound, how = int(schedule_found.lower_bound_bytes), f"schedule, Auto(max_seconds={effort.max_seconds:g})"
    elif problem == "place":
        placement = place(place_problem(instance), AutoPlacer(max_seconds=effort.max_seconds))
        answer, bound = {"offsets": list(map(int, placement.offsets))}, int(placement.lower_bound_bytes)
        how = f"place, Auto(max_seconds={effort.max_seconds:g})"
    elif problem == "spaces":
        spaced = place_in_spaces(spaced_problem(instance), AutoPlacer(max_seconds=effort.max_seconds / 2))
        answer = {"space": list(map(int, spaced.space)), "offsets": list(map(int, spaced.offsets))}
        bound, how = most_benefit(instance), f"place_in_spaces, Auto(max_seconds={effort.max_seconds / 2:g})"
        if spaced.status is Status.OPTIMAL:
            bound = int(spaced.benefit)
    else:
        yield from _sequences(instance, problem, effort)
        return
    yield Finding(instance["name"], problem, None, answer, bound, how, time.perf_counter() - start)


def most_benefit(buffers: Instance) -> int:
    """No placement has more: all that may be ahead of its last space."""
    return sum(gain for gain, allowed in zip(buffers["benefit"], buffers["allowed"], strict=True) if len(allowed) > 1)


def _sequences(graph: Instance, problem: str, effort: Effort) -> Iterator[Finding]:
    start = time.perf_counter()
    remat = remat_problem(graph, copies=problem == "offload")
    bounds = TimeBound(remat)
    least = {limit: bounds.us(limit) for limit in limits_of(graph)}
    possible = [limit for limit, bound in least.items() if math.isfinite(bound)]
    archive = _searched(remat, problem, effort, possible) if possible and effort.max_states else Archive()
    seconds = time.perf_counter() - start
    for limit, bound in least.items():
        point = archive.within(limit)
        answer = None if point is None else {"sequence": sequence_of(remat, point.sequence)}
        is_possible = math.isfinite(bound)
        whole = math.ceil(bound * (1 - _SAME)) if is_possible else None
        yield Finding(graph["name"], problem, limit, answer, whole, str(effort), seconds, is_possible)


def _searched(remat: RematProblem, problem: str, effort: Effort, limits: Sequence[int]) -> Archive:
    """What the search finds whatever the limit; where nothing is copied local moves go on at each limit, the widest first."""
    given = np.arange(remat.problem.node_count, dtype=np.int32)
    if problem == "remat-twice":
        archive, moves = _twice(effort.sweep, remat, given), TWICE
    else:
        orders: list[Ints] = [given, prompt(remat, given)]
        orders.append(np.array(schedule(remat.problem, AutoOrder(max_seconds=effort.max_seconds)).order, np.int32))
        archive, moves = effort.sweep.explore([remat], [_distinct(orders)]), LocalMoves()
    if problem != "offload":
        for limit, seed in product(sorted(limits, reverse=True), range(_SEEDS)):
            _move(remat, archive, limit, replace(moves, moves=effort.max_states * _MOVES_A_STATE // _SEEDS), seed)
    return archive


def _move(remat: RematProblem, archive: Archive, limit: int, moves: LocalMoves, seed: int) -> None:
    """Local moves at a limit: now from the best that is known, now from what is leanest or fastest."""
    known = archive.within(limit) or archive.points[0]
    start = (known, archive.points[-1], archive.points[0])[seed % 3]
    found = moves.improved(remat, start.sequence, limit, np.random.default_rng(seed))
    if found is not None:
        archive.add(Point.of(remat, 0, found))


def _twice(sweep: Sweep, remat: RematProblem, given: Ints) -> Archive:
    archive, deadline = _TwiceArchive(), time.monotonic() + sweep.max_seconds
    for part in sweep.rounds():
        archive.merge(_TwiceSearch(part, [remat], [[given]], Seeds(), None, deadline).done())
    return archive


def _distinct(orders: Iterable[Ints]) -> list[Ints]:
    return list({order.tobytes(): order for order in orders}.values())


class _TwiceArchive(Archive):
    """Only sequences whose first runs are in the order of numbers, and in which no node runs more than twice."""

    def add(self, point: Point) -> bool:
        nodes, first, counts = np.unique(point.sequence, return_index=True, return_counts=True)
        if counts.max(initial=0) > 2 or np.any(np.diff(first[np.argsort(nodes)]) < 0):
            return False
        return super().add(point)


class _TwiceSearch(_SweepSearch):
    """A round of the search from the given order alone, which climbs from such sequences alone."""

    moves = TWICE

    def __init__(self, part: Any, *others: Any) -> None:
        super().__init__(part, *others)
        self.archive = _TwiceArchive()
