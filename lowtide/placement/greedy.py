"""Placements in one pass, and the best of many of them made better by local search.

Which sequence and rule is best differs from problem to problem, and all of them are quick; so `Portfolio` tries them in the order in
which they were seen to succeed on lifetimes of training steps and compilers, and stops at the first that meets the lower bound.

`FreeLists` places blocks as an allocator does: as time goes on, or backward, each in a gap that fits well, which joins its neighbours once
it is free. Gaps are in lists by size, sixteen from each power of two to the next, as in TLSF (Masmano et al., ECRTS 2004), so that one is
found at once however many there are: a million blocks take about a second, where passes by `fitting` are quadratic.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel
from lowtide.base.solver_text import check_choice
from lowtide.placement.base import Anytime, Placement, placed, unplaced
from lowtide.placement.fitting import FITS, ORDERS, FitRule, Order, fitted, sequence
from lowtide.placement.local import settled
from lowtide.placement.strip import Strip, arena_bound_bytes
from lowtide.problems.placement import FREE, Ints, PlaceProblem

_SUBLISTS_LOG2 = 4
_SUBLISTS = 1 << _SUBLISTS_LOG2
_POWERS = 64
_LOOKS = 16  # at gaps of the list of a block's own size, of which some are too small


@dataclass(frozen=True)
class FreeLists:
    """One pass in time, forward or backward. All sizes are rounded to a multiple of every alignment; no offset may be fixed."""

    backward: bool = False

    def offsets(self, strip: Strip) -> Ints | None:
        """[n] the offsets of the strip's blocks; None where some are fixed, or sizes rounded to the alignments may not be added up."""
        blocks = strip.blocks
        grain_bytes = math.lcm(*set(blocks.align.tolist()))
        if (blocks.fixed != FREE).any() or grain_bytes > 2**62 // max(strip.count, 1):
            return None
        first, last = (-blocks.end, -blocks.start) if self.backward else (blocks.start, blocks.end)
        at: Ints = _in_time(-(-blocks.size // grain_bytes), _events(blocks.size, first, last))
        return at * grain_bytes


def _events(size: Ints, first: Ints, last: Ints) -> Ints:
    """Blocks as they come, and ~ of them as they go, which is first; at once the longest come first, then the largest."""
    number = np.arange(len(size))
    when, comes = np.concatenate([last, first]), np.repeat([False, True], len(size))
    nothing = np.zeros_like(size)
    ties = np.concatenate([nothing, -size]), np.concatenate([nothing, first - last])
    return np.concatenate([~number, number])[np.lexsort((*ties, comes, when))]


class _Gaps(NamedTuple):
    """Chunks of the arena by address, taken or free, and those that are free in lists."""

    address: Ints  # by chunk
    length: Ints  # by chunk
    below: Ints  # by chunk, the one that ends where it begins, -1 for none
    above: Ints  # by chunk
    is_free: NDArray[np.bool_]  # by chunk
    before: Ints  # by free chunk, the one before it in its list, -1 for none
    after: Ints
    head: Ints  # by list its first chunk, -1 for none
    filled: Ints  # by power of two, a bit for each of its lists that is not empty


@kernel
def _in_time(size: Any, events: Any) -> NDArray[np.int64]:
    room = 2 * len(size) + 2
    gaps = _Gaps(
        np.zeros(room, np.int64), np.zeros(room, np.int64), np.full(room, -1), np.full(room, -1), np.zeros(room, np.bool_),
        np.full(room, -1), np.full(room, -1), np.full(_POWERS * _SUBLISTS, -1), np.zeros(_POWERS, np.int64),
    )  # fmt: skip
    unused, count = np.arange(room), room  # chunks, as a stack
    chunk_of, at = np.full(len(size), -1), np.zeros(len(size), np.int64)
    top, end = -1, np.int64(0)  # the chunk that lies highest, and where it ends
    for event in events:
        if event < 0:
            chunk = chunk_of[~event]
            for other in (gaps.below[chunk], gaps.above[chunk]):
                if other >= 0 and gaps.is_free[other]:
                    _unlist(other, gaps)
                    chunk, gone = (other, chunk) if other == gaps.below[chunk] else (chunk, other)
                    gaps.length[chunk] += gaps.length[gone]
                    _join(chunk, gaps.above[gone], gaps)
                    top = chunk if top == gone else top
                    unused[count] = gone
                    count += 1
            _enlist(chunk, gaps)
            continue
        wanted = size[event]
        chunk = _fitting(wanted, gaps)
        if chunk >= 0:
            _unlist(chunk, gaps)
        elif top >= 0 and gaps.is_free[top]:  # the arena grows by what the gap at its end lacks
            chunk = top
            _unlist(chunk, gaps)
            end += wanted - gaps.length[chunk]
            gaps.length[chunk] = wanted
        else:
            count -= 1
            chunk = unused[count]
            gaps.address[chunk], gaps.length[chunk] = end, wanted
            gaps.below[chunk], gaps.above[chunk] = top, -1
            if top >= 0:
                gaps.above[top] = chunk
            top, end = chunk, end + wanted
        if gaps.length[chunk] > wanted:
            count -= 1
            rest = unused[count]
            gaps.address[rest], gaps.length[rest] = gaps.address[chunk] + wanted, gaps.length[chunk] - wanted
            gaps.length[chunk] = wanted
            _join(rest, gaps.above[chunk], gaps)
            _join(chunk, rest, gaps)
            top = rest if top == chunk else top
            _enlist(rest, gaps)
        chunk_of[event], at[event] = chunk, gaps.address[chunk]
    return at


@kernel(inner=True, borrows=True)
def _join(chunk: Any, above: Any, gaps: Any) -> None:
    """Let one chunk lie right above another, or nothing."""
    gaps.above[chunk] = above
    if above >= 0:
        gaps.below[above] = chunk


@kernel(inner=True, borrows=True)
def _list_of(length: Any) -> int:
    """The list of gaps of a length of 1 or more: lists hold longer and longer ones."""
    power, rest = 0, length
    while rest > 1:
        rest >>= 1
        power += 1
    sub = length >> power - _SUBLISTS_LOG2 if power >= _SUBLISTS_LOG2 else length << _SUBLISTS_LOG2 - power
    return int(power * _SUBLISTS + sub - _SUBLISTS)


@kernel(inner=True, borrows=True)
def _enlist(chunk: Any, gaps: Any) -> None:
    which = _list_of(gaps.length[chunk])
    first = gaps.head[which]
    gaps.is_free[chunk], gaps.before[chunk], gaps.after[chunk], gaps.head[which] = True, -1, first, chunk
    if first >= 0:
        gaps.before[first] = chunk
    gaps.filled[which // _SUBLISTS] |= 1 << which % _SUBLISTS


@kernel(inner=True, borrows=True)
def _unlist(chunk: Any, gaps: Any) -> None:
    which, before, after = _list_of(gaps.length[chunk]), gaps.before[chunk], gaps.after[chunk]
    gaps.is_free[chunk] = False
    if after >= 0:
        gaps.before[after] = before
    if before >= 0:
        gaps.after[before] = after
        return
    gaps.head[which] = after
    if after < 0:
        gaps.filled[which // _SUBLISTS] &= ~(1 << which % _SUBLISTS)


@kernel(inner=True, borrows=True)
def _fitting(wanted: Any, gaps: Any) -> int:
    """A gap of so much or somewhat more, -1 where none is found."""
    which = _list_of(wanted)
    best, chunk = -1, gaps.head[which]
    for _ in range(_LOOKS):
        if chunk < 0:
            break
        if gaps.length[chunk] >= wanted and (best < 0 or gaps.length[chunk] < gaps.length[best]):
            best = chunk
        chunk = gaps.after[chunk]
    if best >= 0:
        return int(best)
    low = which % _SUBLISTS + 1
    for power in range(which // _SUBLISTS, _POWERS):
        filled = gaps.filled[power] >> low << low
        if filled:
            sub = 0
            while filled >> sub & 1 == 0:
                sub += 1
            return int(gaps.head[power * _SUBLISTS + sub])
        low = 0
    return -1


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
    Greedy("pressure"), Greedy("pressure_size", "best"), Greedy("outward_size"), Greedy("peak_lifetime", "beside"),
    Greedy("peak_end", "beside"), Greedy("conflicts", "best"), Greedy("size"), Greedy("pressure", "best"), Greedy("peak_inner", "beside"),
    Greedy("pressure", "beside"), Greedy("pressure_size", "beside"), Greedy("peak_end", "snug"), Greedy("area"),
    Greedy("outward", "best"), Greedy("peak_start", "beside"), Greedy("peak_lifetime", "snug"), Greedy("size", "best"),
    Greedy("pressure_size", "first"), Greedy("outward_size", "best"), Greedy("area", "best"), Greedy("lifetime", "best"),
    Greedy("start", "best"), Greedy("lifetime"), Greedy("conflicts"), Greedy("start"),
)  # fmt: skip


@dataclass(frozen=True)
class Portfolio(Anytime):
    """The best of many greedy placements, and where none meets the bound, local search (`local.py`)."""

    max_moves: int = 100_000  # of the local search: blocks placed in it
    max_seconds: float = math.inf

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
