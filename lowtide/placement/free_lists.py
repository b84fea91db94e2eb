"""Blocks placed as an allocator places them: as time goes on, each in a gap that fits well, which joins its neighbours once it is free.

Gaps are in lists by size, sixteen from each power of two to the next, as in TLSF (Masmano et al., ECRTS 2004), so that one is found at
once however many there are: a million blocks take about a second, where passes by `fitting` are quadratic. Time may go backward as well.

All sizes are rounded to a multiple of every alignment. Blocks of fixed offsets cannot be placed so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel
from lowtide.placement.strip import Strip
from lowtide.problems.placement import FREE, Ints

_SUBLISTS_LOG2 = 4
_SUBLISTS = 1 << _SUBLISTS_LOG2
_POWERS = 64
_LOOKS = 16  # at gaps of the list of a block's own size, of which some are too small


@dataclass(frozen=True)
class FreeLists:
    """One pass in time, forward or backward."""

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
    """The address of each block."""
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
