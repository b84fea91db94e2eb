"""Blocks: where the forward pass of a training step is narrow, found from the integer arrays alone.

A sequence, or a *segment* of it where it has several (one for each micro-batch, say), is taken apart at its *forward-backward boundary*,
the position across which most bytes wait. What runs before it is the forward pass, whatever its nodes are; what runs after it, the backward
pass. Of the bytes alive at a position of the forward pass some are read by later forward runs, and some only wait for the backward pass. A
*cut* is a position where the former are few: what comes after needs little of what came before. Two cuts enclose a block, and the block's
backward pass ends with the last run that reads what was made inside it. What a cut hands on includes shortcuts and skips, as they are read
by later forward runs; a network without narrow places has no cuts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel
from lowtide.problems.order import Bytes, Ints
from lowtide.remat.problem import RematProblem

Positions = NDArray[np.int64]

_RISE = 1.25  # between two cuts, what is alive for the forward pass rises by at least this factor over either
_STEEP = 1.5  # a cut hands on at most this many times what the cut before or after it does
_FAR = 0.1  # of the forward pass: what is handed on further than that is a skip
_SEGMENT = 4.0  # between two segments, at most this part of what waits at either's boundary waits
_WORTH = 0.02  # of the bytes at the boundary: where less waits inside of blocks, there is nothing to plan


@dataclass(frozen=True, eq=False)
class Blocks:
    """A sequence taken apart: block b runs forward in `[starts[b], starts[b + 1])` and backward in `[ends[b + 1], ends[b])`."""

    sequence: Ints
    starts: Positions  # [blocks + 1] ascending from the segment's first position to the boundary
    ends: Positions  # [blocks + 1] descending from the segment's end to the boundary
    made_at: Positions  # [m] the position of the run that makes a tensor; -1 for none
    read_at: Positions  # [m] the position of the last run that reads it; -1 for none
    forward_at: Positions  # [m] the same of the forward pass alone

    @property
    def count(self) -> int:
        return len(self.starts) - 1

    @property
    def begin(self) -> int:
        return int(self.starts[0])

    @property
    def end(self) -> int:
        return int(self.ends[0])

    @property
    def boundary(self) -> int:
        return int(self.starts[-1])

    def merged(self, size: int) -> Blocks:
        """So many neighbours made one block, from the start; the last may be smaller."""
        chosen = np.unique(np.append(np.arange(0, self.count, size), self.count))
        return replace(self, starts=self.starts[chosen], ends=self.ends[chosen])

    def forward_of(self, block: int) -> Ints:
        return self.sequence[self.starts[block] : self.starts[block + 1]]

    def backward_of(self, block: int) -> Ints:
        return self.sequence[self.ends[block + 1] : self.ends[block]]


def segments(problem: RematProblem, sequence: Ints) -> list[tuple[int, int]]:
    """Where a sequence falls apart into stretches across whose ends little waits: `[begin, end)` of each, all positions in one of them."""
    waiting = _alive(*_spans(problem, sequence, len(sequence)), problem.problem.tensor_bytes, len(sequence))
    valleys = _valleys(waiting, np.zeros_like(waiting), _SEGMENT)
    bounds = np.unique(np.concatenate([[0], valleys, [len(sequence)]])).tolist()
    return list(pairwise(bounds))


def find_blocks(
    problem: RematProblem, sequence: Ints, segment: tuple[int, int] | None = None, most: int = 64, *, skips: bool = True
) -> Blocks | None:
    """The blocks of a sequence that runs each node once, or of a segment of it; at most so many, None where no two are worth planning.

    Without `skips`, what is handed on over more than a share of the forward pass does not count where cuts are looked for.
    """
    begin, end = segment or (0, len(sequence))
    made_at, read_at = _spans(problem, sequence, len(sequence))
    sizes = problem.problem.tensor_bytes
    waiting = _alive(made_at, read_at, sizes, len(sequence))
    boundary = begin + int(np.argmax(waiting[begin : end + 1]))
    forward_at = _spans(problem, sequence, boundary)[1]
    near = (made_at >= begin) & (skips | (forward_at - made_at <= _FAR * (boundary - begin)))
    alive = _alive(made_at, np.where(near, forward_at, -1), sizes, boundary)[begin:]
    # What the backward pass does not read would be kept only for blocks that run forward again: better to cut where it reads all.
    idle = _alive(made_at, np.where(near & (read_at < boundary), forward_at, -1), sizes, boundary)[begin:]
    cuts = begin + _low(_valleys(alive, idle, _RISE), alive)
    starts = np.unique(np.concatenate([[begin], cuts, [boundary]])).astype(np.int64)
    starts = _with_backward_pieces(starts, made_at, read_at, forward_at, end)
    while len(starts) - 1 > most:
        starts = np.append(starts[:-1:2], boundary)
    inside = (made_at >= begin) & (made_at < boundary) & (read_at >= boundary)
    if len(starts) < 3 or sizes[inside].sum() < _WORTH * waiting[boundary]:
        return None
    return Blocks(sequence, starts, _ends(starts, made_at, read_at, forward_at, end), made_at, read_at, forward_at)


def _spans(problem: RematProblem, sequence: Ints, end: int) -> tuple[Positions, Positions]:
    """By tensor: the position of its maker, and of the last run before position `end` that reads it."""
    base = problem.problem
    position_of = np.full(base.node_count + 1, -1, np.int64)
    position_of[sequence] = np.arange(len(sequence))
    readers = np.repeat(np.arange(base.node_count), np.diff(base.read_ptr))
    positions = position_of[readers]
    read_at = np.full(base.tensor_count, -1, np.int64)
    inside = positions < end
    np.maximum.at(read_at, base.read_ids[inside], positions[inside])
    return position_of[base.producer], read_at


def _alive(made_at: Positions, read_at: Positions, sizes: Bytes, end: int) -> Bytes:
    """[end + 1] the bytes that cross each position: made by a run before it and read by one from there on."""
    crossing = (made_at >= 0) & (read_at > made_at)
    change = np.zeros(end + 2, np.int64)
    np.add.at(change, np.minimum(made_at[crossing], end) + 1, sizes[crossing])
    np.add.at(change, np.minimum(read_at[crossing], end) + 1, -sizes[crossing])
    return np.cumsum(change)[: end + 1]


@kernel
def _valleys(levels: Any, idle: Any, rise: Any) -> Positions:
    """The lowest position of each valley whose walls on both sides are at least `rise` times as high; of equals the least idle."""
    valleys = np.empty(len(levels), np.int64)
    count, low, high, falling = 0, 0, levels[0], True
    for position in range(len(levels)):
        level = levels[position]
        if falling:
            if level < levels[low] or (level == levels[low] and idle[position] < idle[low]):
                low = position
            elif level > rise * levels[low]:
                valleys[count] = low
                count += 1
                falling, high = False, level
        else:
            high = max(high, level)
            if level * rise < high:
                falling, low = True, position
    return valleys[:count]


def _low(cuts: Positions, alive: Bytes) -> Positions:
    """The cuts without those that hand on much more than both their neighbours."""
    handed = np.concatenate([[np.inf], alive[cuts], [np.inf]])
    low: Positions = cuts[alive[cuts] <= _STEEP * np.maximum(handed[:-2], handed[2:])]
    return low


def _with_backward_pieces(starts: Positions, made_at: Positions, read_at: Positions, forward_at: Positions, end: int) -> Positions:
    """The starts without those of blocks whose backward pass is empty: they are one with the block before."""
    ends = _ends(starts, made_at, read_at, forward_at, end)
    empty = ends[1:-1] == ends[2:]  # of every block but the first
    return np.concatenate([starts[:1], starts[1:-1][~empty], starts[-1:]])


def _ends(starts: Positions, made_at: Positions, read_at: Positions, forward_at: Positions, end: int) -> Positions:
    """By block the position behind the last run that reads what was made inside and is handed on to no later block."""
    boundary = starts[-1]
    block_of = np.searchsorted(starts, made_at, side="right") - 1
    inner = (made_at >= starts[0]) & (made_at < boundary) & (read_at >= boundary)
    inner[inner] = forward_at[inner] < starts[block_of[inner] + 1]
    ends = np.full(len(starts), boundary, np.int64)
    np.maximum.at(ends, block_of[inner], np.minimum(read_at[inner] + 1, end))
    ends = np.maximum.accumulate(ends[::-1])[::-1].copy()
    ends[0] = end
    return ends
