"""A placement problem as heuristics read it, and a lower bound on every arena that knows of alignment.

Steps are numbered by the events (starts and ends) among those buffers that need bytes, so that a life is a range of small numbers and a
problem over millions of steps takes no more memory than its buffers. The bound is what is lost between buffers that must start at
multiples.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel
from lowtide.problems.placement import FREE, Ints, PlaceProblem


class StripBlocks(NamedTuple):
    """What kernels read of the buffers that need bytes; read-only."""

    size: Ints  # [n]
    start: Ints  # [n] the first section of each life
    end: Ints  # [n] the first section after it
    align: Ints  # [n]
    fixed: Ints  # [n] or FREE


@dataclass(frozen=True, eq=False)
class Strip:
    """The buffers of a problem that need bytes, and the way back to all of them."""

    problem: PlaceProblem
    buffers: NDArray[np.intp]  # [n] which of the problem's each is
    blocks: StripBlocks
    live_bytes: Ints  # [sections] alive in each section

    @classmethod
    def of(cls, problem: PlaceProblem) -> Strip:
        buffers = np.flatnonzero((problem.size_bytes > 0) & (problem.start < problem.end))
        start, end = problem.start[buffers], problem.end[buffers]
        events = _distinct(np.concatenate([start, end]))
        low, high = np.searchsorted(events, start), np.searchsorted(events, end)
        change = np.zeros(len(events), np.int64)
        np.add.at(change, low, problem.size_bytes[buffers])
        np.subtract.at(change, high, problem.size_bytes[buffers])
        blocks = StripBlocks(problem.size_bytes[buffers], low, high, problem.align_bytes[buffers], problem.fixed_bytes[buffers])
        return cls(problem, buffers, blocks, np.cumsum(change)[:-1])

    @property
    def count(self) -> int:
        return len(self.buffers)

    @cached_property
    def peak(self) -> int:
        """The first section with the most bytes alive; 0 where there is none."""
        return int(self.live_bytes.argmax()) if len(self.live_bytes) else 0

    @cached_property
    def grain_bytes(self) -> int:
        """What divides every alignment, and so every offset."""
        return int(np.gcd.reduce(self.blocks.align)) if self.count else 1

    def ceiling_bytes(self, enough_bytes: int) -> int:
        """Beneath what to place blocks so that an arena is about so large, less than a grain above at most.

        A ceiling in the middle of a grain wastes what lies above the last multiple wherever a whole number of grains would end there.
        """
        return -(-enough_bytes // self.grain_bytes) * self.grain_bytes

    def offsets(self, at: Ints) -> Ints:
        """The problem's offsets, given those of the blocks; others lie where they are fixed, or at 0."""
        offsets = np.where(self.problem.fixed_bytes == FREE, 0, self.problem.fixed_bytes)
        offsets[self.buffers] = at
        return offsets

    def top_bytes(self, at: Ints) -> int:
        return int((at + self.blocks.size).max(initial=0))


def _distinct(steps: Ints) -> Ints:
    """Ascending; many times faster than `np.unique`, which hashes them."""
    ascending = np.sort(steps)
    return ascending[np.diff(ascending, prepend=ascending[:1] - 1) > 0]


def arena_bound_bytes(problem: PlaceProblem) -> int:
    """No arena is smaller; at least `problem.lower_bound_bytes`.

    Let g divide every alignment. Then all offsets are multiples of g, so of the buffers alive in a section each but the highest takes its
    size rounded up to g. The highest is at best the one that rounding would add most to: the bound is the rounded sizes less that.
    """
    return max(problem.lower_bound_bytes, _aligned_bytes(Strip.of(problem)))


def _aligned_bytes(strip: Strip) -> int:
    size, start, end, _, _ = strip.blocks
    grain = strip.grain_bytes
    if grain == 1:
        return 0
    slack = -size % grain
    change = np.zeros(len(strip.live_bytes) + 1, np.int64)
    np.add.at(change, start, slack)
    np.subtract.at(change, end, slack)
    most = _most_alive(np.argsort(-slack, kind="stable"), slack, start, end, len(strip.live_bytes))
    return int((strip.live_bytes + np.cumsum(change)[:-1] - most).max(initial=0))


@kernel
def _most_alive(order: Any, weight: Any, start: Any, end: Any, count: Any) -> NDArray[np.int64]:
    """By section: the largest weight among the lives that hold it; `order` is by falling weight, and paints what nobody has painted."""
    most = np.zeros(count, np.int64)
    onward = np.arange(count + 1)  # the first section from here that is not painted, or a step on the way there
    for block in order:
        section = start[block]
        while True:
            root = section
            while onward[root] != root:
                root = onward[root]
            while onward[section] != root:
                onward[section], section = root, onward[section]
            if root >= end[block]:
                break
            most[root] = weight[block]
            onward[root] = section = root + 1
    return most
