"""Blocks placed one after the other, in a given sequence: each where a rule says, and none moved again.

Of the blocks placed so far a list is kept by offset. For the next one, the list is gone through from the bottom for gaps between blocks
alive with it, in which it may lie at the low or at the high end. In time this is at most quadratic, a comparison of two lives being all
that most entries take: 60,000 blocks in about two seconds. With a deadline the clock is looked at in between; once the time is up, the
blocks that are left are stacked upon all others.

The sequence is by what blocks are, or outward in time from the section with the most bytes alive. Every sequence starts with the blocks of
fixed offsets; ties are broken by size, then by the caller's order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel
from lowtide.placement.strip import Strip
from lowtide.problems.placement import FREE, Ints

Order: TypeAlias = Literal[
    "size",
    "area",
    "lifetime",
    "start",
    "conflicts",  # the largest first, or the earliest
    "pressure",
    "pressure_size",  # first the blocks of sections with the most bytes alive: the longest of these, or the largest
    "outward",
    "outward_size",  # first the blocks nearest to the peak, in time
    "peak_end",
    "peak_start",
    "peak_lifetime",
    "peak_inner",  # the blocks at the peak, then forward and backward as time goes on
]
ORDERS: tuple[Order, ...] = get_args(Order)


def sequence(strip: Strip, order: Order) -> NDArray[np.intp]:
    """[n] the blocks of a strip, the first to be placed first."""
    keys = (*_KEYS[order](strip), -strip.blocks.size)
    return np.lexsort((*reversed(keys), strip.blocks.fixed == FREE))


def _by_conflicts(strip: Strip) -> tuple[Ints, ...]:
    """How many lives meet a life: all that start before its end, less those that end before its start."""
    start, end = strip.blocks.start, strip.blocks.end
    return (np.searchsorted(np.sort(end), start, "right") - np.searchsorted(np.sort(start), end, "left"),)


def _from_peak(at_peak: Callable[[Strip], Ints]) -> Callable[[Strip], tuple[Ints, ...]]:
    """Blocks alive at the peak by a key of their own; then those after it as they start; then those before it, backward as they end."""

    def keys(strip: Strip) -> tuple[Ints, ...]:
        start, end = strip.blocks.start, strip.blocks.end
        after, before = start > strip.peak, end <= strip.peak
        where = np.select([after, before], [1, 2], 0)
        return where, np.select([after, before], [start, -end], at_peak(strip)), np.select([after, before], [-end, start], 0)

    return keys


def _lifetime(strip: Strip) -> Ints:
    return strip.blocks.end - strip.blocks.start


def _distance(strip: Strip) -> Ints:
    """Sections between each block's life and the peak, 0 where the life holds it."""
    return np.maximum(np.maximum(strip.blocks.start - strip.peak, strip.peak + 1 - strip.blocks.end), 0)


def _pressure(strip: Strip) -> Ints:
    """The most bytes alive at once during each block's life."""
    return _most_within(strip.live_bytes, strip.blocks.start, strip.blocks.end)


_KEYS: Mapping[Order, Callable[[Strip], tuple[Any, ...]]] = {
    "size": lambda strip: (-strip.blocks.size, -_lifetime(strip)),
    "area": lambda strip: (-strip.blocks.size.astype(np.float64) * _lifetime(strip),),
    "lifetime": lambda strip: (-_lifetime(strip),),
    "start": lambda strip: (strip.blocks.start,),
    "conflicts": _by_conflicts,
    "pressure": lambda strip: (-_pressure(strip), -_lifetime(strip)),
    "pressure_size": lambda strip: (-_pressure(strip),),
    "outward": lambda strip: (_distance(strip), -_lifetime(strip)),
    "outward_size": lambda strip: (_distance(strip),),
    "peak_end": _from_peak(lambda strip: -strip.blocks.end),
    "peak_start": _from_peak(lambda strip: strip.blocks.start),
    "peak_lifetime": _from_peak(lambda strip: -_lifetime(strip)),
    # Who reaches far from the peak on both sides comes first.
    "peak_inner": _from_peak(lambda strip: -np.minimum(strip.blocks.end - strip.peak, strip.peak - strip.blocks.start)),
}


@kernel
def _most_within(values: Any, low: Any, high: Any) -> NDArray[np.int64]:
    """The largest of `values[low[i]:high[i]]` for each i, from a tree of maxima."""
    count, width = len(values), 1
    while width < count:
        width *= 2
    tree = np.zeros(2 * width, np.int64)
    tree[width : width + count] = values
    for at in range(width - 1, 0, -1):
        tree[at] = max(tree[2 * at], tree[2 * at + 1])
    most = np.zeros(len(low), np.int64)
    for index in range(len(low)):
        left, right = low[index] + width, high[index] + width
        while left < right:
            if left & 1:
                most[index] = max(most[index], tree[left])
                left += 1
            if right & 1:
                right -= 1
                most[index] = max(most[index], tree[right])
            left, right = left // 2, right // 2
    return most


FitRule: TypeAlias = Literal[
    "first",  # the lowest place
    "best",  # the low end of the smallest gap
    "beside",  # the end of a gap at which the neighbour's life is most alike
    "snug",  # the same end of the smallest gap
]
FITS: tuple[FitRule, ...] = get_args(FitRule)
_FIRST, _BEST, _BESIDE = 0, 1, 2
_CHUNK_LOOKS = 10_000_000  # at blocks placed already, between two looks at the clock: a tenth of a second


def fitted(strip: Strip, sequence: NDArray[np.intp], fit: FitRule, capacity_bytes: int, deadline: float = math.inf) -> tuple[Ints, int]:
    """[n] the offsets of blocks placed in `sequence`; those for which there is no gap below `capacity_bytes` go above all they meet.

    And how many were stacked only, as `deadline`, by `time.monotonic`, had passed.

    "first" and "best" know of no capacity: to them the space above the highest block is a gap like any other. To the other two the
    arena has a ceiling, beside which a block that lives for long lies as well as on the floor. Blocks that outlive the peak then grow
    from one side while those that die soon after it shrink from the other, and what is free stays in one piece between them.
    """
    count, placed = len(sequence), 0
    offsets = np.zeros(count, np.int64)
    by_offset = tuple(np.empty((4, count), np.int64))  # of the blocks placed: low and high ends, and their lives
    rule, horizon = FITS.index(fit), len(strip.live_bytes)
    while placed < count and (placed == 0 or time.monotonic() < deadline):
        some = sequence[: math.isqrt(placed**2 + 2 * _CHUNK_LOOKS) + 1]
        _fit(strip.blocks, some, placed, offsets, by_offset, rule, capacity_bytes, strip.peak, horizon)
        placed = len(some)
    _stack(strip.blocks, sequence, placed, offsets)
    return offsets, count - placed


@kernel(inner=True, borrows=True)
def mismatch(start: Any, end: Any, other_start: Any, other_end: Any, peak: Any) -> Any:
    """How little two lives are alike where it matters: in their ends after the peak, in their starts before it."""
    if start > peak:
        return abs(end - other_end)
    if end <= peak:
        return abs(start - other_start)
    return abs(end - other_end) + abs(start - other_start)


@kernel(borrows=True)
def _fit(blocks: Any, sequence: Any, first: Any, offsets: Any, by_offset: Any, rule: Any, capacity: Any, peak: Any, horizon: Any) -> None:
    """Place the blocks of `sequence` from `first` on; those before it are in the lists by offset: where they lie and when they live."""
    low, high, starts, ends = by_offset
    for count in range(first, len(sequence)):
        block = sequence[count]
        offset = blocks.fixed[block]
        if offset == FREE:
            one = (blocks.size[block], blocks.start[block], blocks.end[block], blocks.align[block])
            if rule <= _BEST:
                offset = _lowest(one, rule == _BEST, low, high, starts, ends, count)
            else:
                offset = _alike(one, rule == _BESIDE, low, high, starts, ends, count, capacity, peak, horizon)
        offsets[block] = offset
        place = np.searchsorted(low[:count], offset)
        for at in range(count, place, -1):
            low[at], high[at], starts[at], ends[at] = low[at - 1], high[at - 1], starts[at - 1], ends[at - 1]
        low[place], high[place], starts[place], ends[place] = offset, offset + blocks.size[block], blocks.start[block], blocks.end[block]


@kernel(borrows=True)
def _stack(blocks: Any, sequence: Any, first: Any, offsets: Any) -> None:
    """Place the blocks of `sequence` from `first` on above all others, each upon the one before."""
    top = 0
    for at in range(len(sequence)):
        block = sequence[at]
        if blocks.fixed[block] != FREE:
            offsets[block] = blocks.fixed[block]
        elif at >= first:
            offsets[block] = -(-top // blocks.align[block]) * blocks.align[block]
        top = max(top, offsets[block] + blocks.size[block])


@kernel(inner=True, borrows=True)
def _lowest(one: Any, best: Any, low: Any, high: Any, starts: Any, ends: Any, count: Any) -> Any:
    """The low end of the first gap, or of the smallest."""
    size, start, end, align = one
    top, lowest, least = 0, -1, 0
    for at in range(count):
        if starts[at] < end and start < ends[at]:
            space = low[at] - top - size
            if space >= 0:
                if not best:
                    return top
                if lowest < 0 or space < least:
                    lowest, least = top, space
            if high[at] > top:
                top = -(-high[at] // align) * align
    return top if lowest < 0 else lowest


@kernel(inner=True, borrows=True)
def _alike(one: Any, any_gap: Any, low: Any, high: Any, starts: Any, ends: Any, count: Any, capacity: Any, peak: Any, horizon: Any) -> Any:
    """The end of a gap whose neighbour's life is most alike: of any gap, or of the smallest; floor and ceiling live for ever."""
    size, start, end, align = one
    top, place, least, closest = 0, -1, 0, 0
    below_start, below_end = -1, horizon
    for at in range(count + 1):
        if at < count:
            if starts[at] >= end or start >= ends[at]:
                continue
            floor, above_start, above_end = low[at], starts[at], ends[at]
        else:
            floor, above_start, above_end = capacity, -1, horizon
        space = floor - top - size
        if space >= 0 and (any_gap or place < 0 or space <= least):
            if not any_gap and (place < 0 or space < least):
                place, least = -1, space
            far = mismatch(start, end, below_start, below_end, peak)
            if place < 0 or far < closest:
                place, closest = top, far
            far = mismatch(start, end, above_start, above_end, peak)
            if far < closest:
                place, closest = (floor - size) // align * align, far
        if at < count and high[at] > top:
            top, below_start, below_end = -(-high[at] // align) * align, starts[at], ends[at]
    return top if place < 0 else place
