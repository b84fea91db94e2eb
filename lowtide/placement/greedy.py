"""Placements in one pass, and the best of many of them made better by local search.

Which sequence and rule is best differs from problem to problem, and all of them are quick; so `Portfolio` tries them in the order in
which they were seen to succeed on lifetimes of training steps and compilers, and stops at the first that meets the lower bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lowtide.base.solver_text import check_choice
from lowtide.placement.base import Placement, placed, unplaced
from lowtide.placement.fitting import FITS, ORDERS, FitRule, Order, fitted, sequence
from lowtide.placement.free_lists import FreeLists
from lowtide.placement.local import settled
from lowtide.placement.strip import Strip, arena_bound_bytes
from lowtide.problems.placement import Ints, PlaceProblem

_MAX_LOOKS = 5_000_000_000  # of placing one block at another, in all passes of a portfolio: so many take some five seconds
_FEWEST = 4  # passes where the blocks are too many for that; none of so many more, where `FreeLists` has an answer
_OTHER_ROUNDS = 1 << 20  # of local search: rounds from here on differ from those that start at 0


class StripPlacement(NamedTuple):
    """A placement of a strip on its way to an answer."""

    offsets: Ints  # [n] of blocks
    placer: object  # that found it
    stats: Mapping[str, int]


@dataclass(frozen=True)
class Greedy:
    """Buffers one after the other, in a sequence and by a rule of `fitting`."""

    order: Order = "size"
    fit: FitRule = "first"

    def __post_init__(self) -> None:
        check_choice("order", self.order, ORDERS)
        check_choice("fit", self.fit, FITS)

    def place(self, problem: PlaceProblem, capacity_bytes: int | None = None) -> Placement:
        return self.place_by(math.inf, problem, capacity_bytes)

    def place_by(self, deadline: float, problem: PlaceProblem, capacity_bytes: int | None = None) -> Placement:
        """The same until `deadline`, by `time.monotonic`; `stats` count as "stacked" what had to be put above all others then."""
        bound_bytes = arena_bound_bytes(problem)
        strip = Strip.of(problem)
        placement = self.strip_placement(strip, strip.ceiling_bytes(bound_bytes if capacity_bytes is None else capacity_bytes), deadline)
        return _answer(strip, placement, capacity_bytes, bound_bytes)

    def offsets(self, strip: Strip, ceiling_bytes: int) -> Ints:
        """[n] the same for the blocks of a strip, to be held beneath a ceiling if that is possible."""
        return self.strip_placement(strip, ceiling_bytes).offsets

    def strip_placement(self, strip: Strip, ceiling_bytes: int, deadline: float = math.inf, count: int = 1) -> StripPlacement:
        """The same, with what it took: the `count`th placement."""
        offsets, stacked = fitted(strip, sequence(strip, self.order), self.fit, ceiling_bytes, deadline)
        return StripPlacement(offsets, self, {"placements": count} | ({"stacked": stacked} if stacked else {}))


_PASSES = (
    Greedy("pressure"),
    Greedy("pressure_size", "best"),
    Greedy("outward_size"),
    Greedy("peak_lifetime", "beside"),
    Greedy("peak_end", "beside"),
    Greedy("conflicts", "best"),
    Greedy("size"),
    Greedy("pressure", "best"),
    Greedy("peak_inner", "beside"),
    Greedy("pressure", "beside"),
    Greedy("pressure_size", "beside"),
    Greedy("peak_end", "snug"),
    Greedy("area"),
    Greedy("outward", "best"),
    Greedy("peak_start", "beside"),
    Greedy("peak_lifetime", "snug"),
    Greedy("size", "best"),
    Greedy("pressure_size", "first"),
    Greedy("outward_size", "best"),
    Greedy("area", "best"),
    Greedy("lifetime", "best"),
    Greedy("start", "best"),
    Greedy("lifetime"),
    Greedy("conflicts"),
    Greedy("start"),
)


@dataclass(frozen=True)
class Portfolio:
    """The best of many greedy placements, and where none meets the bound, local search (`local.py`)."""

    max_moves: int = 100_000  # of the local search: blocks placed in it
    max_seconds: float = math.inf

    def place(self, problem: PlaceProblem, capacity_bytes: int | None = None) -> Placement:
        """The smallest arena found, or the first that fits the capacity."""
        bound_bytes = arena_bound_bytes(problem)
        if capacity_bytes is not None and capacity_bytes < bound_bytes:
            return unplaced(problem, self, capacity_bytes=capacity_bytes, bound_bytes=bound_bytes)
        strip = Strip.of(problem)
        *_, last = self._found(strip, bound_bytes if capacity_bytes is None else capacity_bytes)
        return _answer(strip, last, capacity_bytes, bound_bytes)

    def answers(self, problem: PlaceProblem, capacity_bytes: int | None = None) -> Iterator[Placement]:
        bound_bytes = arena_bound_bytes(problem)
        if capacity_bytes is not None and capacity_bytes < bound_bytes:
            yield unplaced(problem, self, capacity_bytes=capacity_bytes, bound_bytes=bound_bytes)
            return
        strip = Strip.of(problem)
        for placement in self._found(strip, bound_bytes if capacity_bytes is None else capacity_bytes):
            yield _answer(strip, placement, capacity_bytes, bound_bytes)

    def improved(self, problem: PlaceProblem, placement: Placement, capacity_bytes: int | None = None) -> Iterator[Placement]:
        """Smaller and smaller arenas than that of an earlier answer, if any, by local search alone; by other moves than `answers` tries."""
        bound_bytes, strip = arena_bound_bytes(problem), Strip.of(problem)
        deadline = time.monotonic() + self.max_seconds
        enough_bytes = placement.lower_bound_bytes if capacity_bytes is None else capacity_bytes
        best = np.array(placement.offsets, np.int64)[strip.buffers]
        for at, moves in settled(strip, best, enough_bytes, self._moves(strip), deadline, first_round=_OTHER_ROUNDS):
            yield _answer(strip, StripPlacement(at, self, {"moves": moves}), capacity_bytes, bound_bytes)

    def _found(self, strip: Strip, enough_bytes: int) -> Iterator[StripPlacement]:
        """At least one placement, each better than the one before, until one is within `enough_bytes`."""
        deadline = time.monotonic() + self.max_seconds
        comparisons, best, count = max(strip.count**2 // 2, 1), None, 0
        if comparisons > _MAX_LOOKS:
            for each in (FreeLists(), FreeLists(backward=True)):
                at = each.offsets(strip)
                if at is not None and (best is None or strip.top_bytes(at) < strip.top_bytes(best)):
                    best = at
                    yield StripPlacement(at, each, {"placements": 1 + each.backward})
                    if strip.top_bytes(best) <= enough_bytes or time.monotonic() > deadline:
                        return
        passes = max(_MAX_LOOKS // comparisons, _FEWEST) if best is None or comparisons <= _FEWEST * _MAX_LOOKS else 0
        for count, placer in enumerate(_PASSES[:passes], 1):
            placement = placer.strip_placement(strip, strip.ceiling_bytes(enough_bytes), deadline, count)
            if best is None or strip.top_bytes(placement.offsets) < strip.top_bytes(best):
                best = placement.offsets
                yield placement
            if strip.top_bytes(best) <= enough_bytes or time.monotonic() > deadline:
                return
        if best is None:
            return
        for at, moves in settled(strip, best, enough_bytes, self._moves(strip), deadline):
            yield StripPlacement(at, self, {"placements": count, "moves": moves})

    def _moves(self, strip: Strip) -> int:
        """As many as allowed, fewer where each has much to look at, and none where not even a start can be made."""
        moves = min(self.max_moves, _MAX_LOOKS // 10 // max(strip.count, 1))
        return moves if moves >= strip.count else 0


def _answer(strip: Strip, placement: StripPlacement, capacity_bytes: int | None, bound_bytes: int) -> Placement:
    offsets = strip.offsets(placement.offsets)
    return placed(strip.problem, offsets, placement.placer, capacity_bytes=capacity_bytes, bound_bytes=bound_bytes, stats=placement.stats)
