"""Time cut into sections: what the exact placer reads of a problem.

A section is a maximal set of buffers that are all alive at one step: of the steps between two events only those between a start and the
next end matter, as the buffers alive at any other step are alive together in one of these too. There are at most as many as buffers.

Buffers are numbered by the first section of their lives, so that those of a range of sections which no life leaves are a range of numbers.
Bytes are counted in units: the largest that divides every size, every fixed offset and every alignment that matters.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.problems.placement import FREE, Ints, PlaceProblem

_SEED = 20_231  # of the words that states are hashed with


class SectionNet(NamedTuple):
    """A problem by sections, in units; read-only. Rows are `ptr`, `ids` pairs."""

    size: Any  # [n]
    align: Any  # [n]
    fixed: Any  # [n] or FREE
    low: Any  # [n] the first section of each buffer's life
    high: Any  # [n] the first section after it
    first: Any  # [m + 1] the first buffer whose life starts in each section or later
    member_ptr: Any  # [m + 1] buffers alive in each section
    member_ids: Any
    seat_ptr: Any  # [n + 1] of each buffer's sections, had they a number for each buffer alive in them
    meet_ptr: Any  # [n + 1] buffers that share a section with each buffer
    meet_ids: Any
    fixed_ptr: Any  # [n + 1] of these, those that are fixed, by offset
    fixed_ids: Any
    plain: Any  # [n] 0 or 1: free, with no alignment and no fixed buffer to mind
    twin: Any  # [n] the buffer before, of the same size, life and alignment, and free like this one; or -1
    key: Any  # [n, 2] random words of each buffer


@dataclass(frozen=True, eq=False)
class Sections:
    """A problem's net, and the way back from it."""

    net: SectionNet
    buffers: NDArray[np.int64]  # [n] which of the problem's buffers each is
    unit_bytes: int
    idle_bytes: int  # the arena that buffers need which share bytes with nobody, but lie somewhere

    def offsets(self, problem: PlaceProblem, floor: Ints) -> Ints:
        """The problem's offsets from those of the net's buffers; the others lie where they are fixed, or at 0."""
        offsets = np.where(problem.fixed_bytes == FREE, 0, problem.fixed_bytes)
        offsets[self.buffers] = floor * self.unit_bytes
        return offsets


def cells(problem: PlaceProblem) -> int:
    """How many pairs of a buffer and a section of its life there are: the memory that a net takes, before it is taken."""
    live = _live(problem)
    _, low, high = _spans(problem.start[live], problem.end[live])
    return int((high - low).sum())


def pairs(problem: PlaceProblem) -> int:
    """How many ordered pairs of buffers share a step: the same, for the rows of those that meet."""
    live = _live(problem)
    starts, ends = np.sort(problem.start[live]), np.sort(problem.end[live])
    meeting = np.searchsorted(starts, problem.end[live], "left") - np.searchsorted(ends, problem.start[live], "right")
    return int(meeting.sum()) - len(live)


def cut(problem: PlaceProblem) -> Sections:
    live = _live(problem)
    count, low, high = _spans(problem.start[live], problem.end[live])
    order = np.lexsort((live, problem.size_bytes[live], high, low))
    buffers, low, high = live[order], low[order], high[order]
    size, fixed, align = problem.size_bytes[buffers], problem.fixed_bytes[buffers], problem.align_bytes[buffers]
    unit = _unit(size, fixed, align)
    align = np.where(unit % align == 0, 1, align // unit)
    size, fixed = size // unit, np.where(fixed == FREE, FREE, fixed // unit)
    first = np.searchsorted(low, np.arange(count + 1), "left")
    meet_ptr, meet_ids = _meetings(low, high, first)
    key = np.random.default_rng(_SEED).integers(0, 2**63, (len(size), 2), np.int64).astype(np.uint64)
    fixed_ptr, fixed_ids = _fixed_rows(fixed, meet_ptr, meet_ids)
    plain = (fixed == FREE) & (align == 1) & (np.diff(fixed_ptr) == 0)
    net = SectionNet(
        size, align, fixed, low, high, first, *_members(low, high, count), np.concatenate([[0], np.cumsum(high - low)]), meet_ptr,
        meet_ids, fixed_ptr, fixed_ids, plain.astype(np.int8), _twins(low, high, size, align, fixed), key,
    )  # fmt: skip
    return Sections(net, buffers, unit, _idle_bytes(problem))


def _live(problem: PlaceProblem) -> NDArray[np.int64]:
    return np.flatnonzero((problem.size_bytes > 0) & (problem.start < problem.end)).astype(np.int64)


def _idle_bytes(problem: PlaceProblem) -> int:
    idle = (problem.size_bytes == 0) | (problem.start >= problem.end)
    return int((np.maximum(problem.fixed_bytes, 0) + problem.size_bytes)[idle].max(initial=0))


def _spans(start: Ints, end: Ints) -> tuple[int, Ints, Ints]:
    """How many sections there are, and each life as a range of them: each is at a start that an end follows next."""
    steps = np.unique(np.concatenate([start, end]))
    starts, ends = np.isin(steps, start), np.isin(steps, end)
    at = steps[:-1][starts[:-1] & ends[1:]]
    return len(at), np.searchsorted(at, start, "left"), np.searchsorted(at, end, "left")


def _members(low: Ints, high: Ints, count: int) -> tuple[Ints, NDArray[np.int32]]:
    width = high - low
    buffer = np.repeat(np.arange(len(low)), width)
    section = np.arange(len(buffer)) - np.repeat(np.cumsum(width) - width, width) + low[buffer]
    ptr = np.searchsorted(np.sort(section), np.arange(count + 1), "left")
    return ptr, buffer[np.argsort(section, kind="stable")].astype(np.int32)


def _meetings(low: Ints, high: Ints, first: Ints) -> tuple[Ints, NDArray[np.int32]]:
    """Of each buffer those that it shares a section with: the later ones among them are a range of numbers."""
    n = len(low)
    later = first[high] - np.arange(1, n + 1)
    one = np.repeat(np.arange(n), later)
    other = np.arange(len(one)) - np.repeat(np.cumsum(later) - later, later) + one + 1
    row, ids = np.concatenate([one, other]), np.concatenate([other, one])
    ptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=n))])
    return ptr, ids[np.argsort(row, kind="stable")].astype(np.int32)


def _fixed_rows(fixed: Ints, meet_ptr: Ints, meet_ids: NDArray[np.int32]) -> tuple[Ints, NDArray[np.int32]]:
    row = np.repeat(np.arange(len(fixed)), np.diff(meet_ptr))
    are_fixed = fixed[meet_ids] != FREE
    row, ids = row[are_fixed], meet_ids[are_fixed]
    order = np.lexsort((fixed[ids], row))
    return np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(fixed)))]), ids[order]


def _twins(low: Ints, high: Ints, size: Ints, align: Ints, fixed: Ints) -> Ints:
    twin = np.full(len(size), -1)
    same = np.zeros(len(size), bool)
    if len(size) > 1:
        same[1:] = fixed[1:] == FREE
        for each in (low, high, size, align, fixed):
            same[1:] &= each[1:] == each[:-1]
    twin[same] = np.flatnonzero(same) - 1
    return twin


def _unit(size: Ints, fixed: Ints, align: Ints) -> int:
    """Offsets are sums of sizes, rounded up to alignments, on top of fixed ones: multiples of what divides all three.

    An alignment that divides the unit holds by itself, and does not make it smaller.
    """
    unit = int(np.gcd.reduce(np.concatenate([size, fixed[fixed != FREE]]))) or 1
    for each in sorted(map(int, np.unique(align)), reverse=True):
        if unit % each:
            unit = gcd(unit, each)
    return unit
