"""Local search beneath a ceiling: a block that has no place takes one, and those that lay there look for another.

Nothing ever lies above the ceiling. While blocks are without a place, the one of the largest area goes where those in its way matter
least. Long lives matter more than short ones; and how much a block matters grows each time that it had to push others out, so that two
blocks do not go on pushing out each other. Of places that cost the same it takes the one at which the neighbour's life is most alike,
give or take some noise. The search ends where all blocks have a place; it starts anew, from another greedy placement, where that takes
too long.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from lowtide.base.kernels import kernel
from lowtide.placement.fitting import FitRule, Order, fitted, mismatch, sequence
from lowtide.placement.strip import Strip
from lowtide.problems.placement import FREE, Ints

_STARTS: tuple[tuple[Order, FitRule], ...] = (
    ("peak_end", "beside"),
    ("peak_lifetime", "beside"),
    ("peak_inner", "beside"),
    ("pressure", "beside"),
)
_NOISES = (0.1, 0.5, 1.0)
_GRUDGES = (16, 4)  # what a block matters more each time that it had to push others out
_LEAST, _MOST = 32, 256  # what blocks matter at first, from the shortest life to the longest: short ones find another place more easily
_ROUND = 4_000  # moves of one start: those that succeed mostly do so within these
_FINE = 4_096  # a ceiling is raised no finer than to this part of the bound
_HELD = 1 << 40  # what it costs to push out a block of a fixed offset


def settled(
    strip: Strip, best: Ints, enough_bytes: int, max_moves: int, deadline: float, first_round: int = 0
) -> Iterator[tuple[Ints, int]]:
    """Offsets of smaller and smaller arenas than that of `best`, with the moves made so far, until one is within `enough_bytes`.

    Half the moves are spent beneath the ceiling asked for, rounded up to a whole grain; half the rest beneath it as it is; and what is
    left beneath ceilings halfway from there to the best arena so far.
    `deadline` is by `time.monotonic`; `first_round` decides which random numbers are drawn.
    """
    search = _Rounds(strip, deadline, first_round)
    for ceiling_bytes in dict.fromkeys((strip.ceiling_bytes(enough_bytes), enough_bytes)):
        if strip.top_bytes(best) - ceiling_bytes <= 0:
            continue
        until = (max_moves + search.moves) // 2
        while search.moves < until and not search.is_late:
            at = search.fresh(ceiling_bytes)
            if at is not None:
                best = at
                yield at, search.moves
                break
        if strip.top_bytes(best) <= enough_bytes:
            return
    low_bytes, high_bytes = enough_bytes, strip.top_bytes(best)
    while search.moves < max_moves and not search.is_late and high_bytes - low_bytes > max(enough_bytes // _FINE, strip.grain_bytes):
        ceiling_bytes = (low_bytes + high_bytes) // 2
        at = search.beneath(best, ceiling_bytes)
        if at is None:
            low_bytes = ceiling_bytes
        else:
            best, high_bytes = at, strip.top_bytes(at)
            yield at, search.moves


class _Rounds:
    """Rounds of the search, each with its own start and noise; all from one sequence of random numbers."""

    def __init__(self, strip: Strip, deadline: float, first_round: int) -> None:
        self.strip, self.deadline = strip, deadline
        self.moves, self.round = 0, first_round

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def fresh(self, ceiling_bytes: int) -> Ints | None:
        """A placement beneath the ceiling from the next start, or None."""
        order, fit = _STARTS[self.round % len(_STARTS)]
        at, _ = fitted(self.strip, sequence(self.strip, order), fit, ceiling_bytes, self.deadline)
        return None if self.is_late else self._run(at, ceiling_bytes)

    def beneath(self, best: Ints, ceiling_bytes: int) -> Ints | None:
        """The same, from a placement that is somewhat higher, and then from others."""
        for at in (best, None, best, None):
            offsets = self.fresh(ceiling_bytes) if at is None else self._run(at.copy(), ceiling_bytes)
            if offsets is not None or self.is_late:
                return offsets
        return None

    def _run(self, at: Ints, ceiling_bytes: int) -> Ints | None:
        turn, self.round = self.round // len(_STARTS), self.round + 1
        noise, grudge = _NOISES[turn % len(_NOISES)], _GRUDGES[turn // len(_NOISES) % len(_GRUDGES)]
        horizon = len(self.strip.live_bytes)
        done, moves = _settle(self.strip.blocks, at, ceiling_bytes, self.strip.peak, horizon, self.round, noise, grudge, _ROUND)
        self.moves += moves + self.strip.count  # starting is a move of every block: a start that fails at once must cost something
        return at if done else None


@kernel
def _settle(
    blocks: Any, offsets: Any, ceiling: Any, peak: Any, horizon: Any, seed: Any, noise: Any, grudge: Any, max_moves: Any
) -> tuple[Any, Any]:
    """Whether all blocks were placed beneath the ceiling, at what are now the `offsets`, and after how many moves."""
    size, start, end, _, fixed = blocks
    n = len(size)
    random = np.array([seed], np.uint64)
    matters = np.where(fixed == FREE, _LEAST + (_MOST - _LEAST) * (end - start) // horizon, _HELD)
    area = size.astype(np.float64) * (end - start)
    tops = offsets + size
    waiting = np.flatnonzero(tops > ceiling)
    count, waiting = len(waiting), np.concatenate((waiting, np.empty(n - len(waiting), np.int64)))
    lying = np.flatnonzero(tops <= ceiling)
    placed = len(lying)
    by_low, by_high = np.empty(n, np.int64), np.empty(n, np.int64)  # the blocks placed: by where they start, and by where they end
    by_low[:placed] = lying[np.argsort(offsets[lying], kind="mergesort")]
    by_high[:placed] = lying[np.argsort(tops[lying], kind="mergesort")]
    near_low, near_high = np.empty(n, np.int64), np.empty(n, np.int64)
    for move in range(max_moves):
        if count == 0:
            return True, move
        choice = 0
        for other in range(1, count):
            if area[waiting[other]] > area[waiting[choice]]:
                choice = other
        block = waiting[choice]
        count -= 1
        waiting[choice] = waiting[count]
        near = _meeting(by_low[:placed], start, end, block, near_low)
        _meeting(by_high[:placed], start, end, block, near_high)
        both = (near_low[:near], near_high[:near])
        offset, cost = _cheapest(block, both, blocks, offsets, matters, ceiling, peak, horizon, random, noise)
        if cost >= _HELD:
            return False, move
        if cost > 0:
            matters[block] += grudge
            for other in near_low[:near]:
                if offsets[other] < offset + size[block] and offset < tops[other]:
                    _remove(by_low, placed, offsets, other)
                    _remove(by_high, placed, tops, other)
                    placed -= 1
                    waiting[count] = other
                    count += 1
        offsets[block], tops[block] = offset, offset + size[block]
        _insert(by_low, placed, offsets, block)
        _insert(by_high, placed, tops, block)
        placed += 1
    return count == 0, max_moves


@kernel(inner=True, borrows=True)
def _uniform(random: Any) -> Any:
    """The next of a sequence of numbers in [0, 1): a linear congruential generator's upper bits."""
    random[0] = random[0] * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    return np.float64(random[0] >> np.uint64(33)) / 2147483648.0


@kernel(inner=True, borrows=True)
def _before(blocks: Any, count: Any, keys: Any, key: Any) -> Any:
    """How many of the first `count` blocks, which are by rising keys, have smaller ones."""
    left, right = 0, count
    while left < right:
        middle = (left + right) // 2
        if keys[blocks[middle]] < key:
            left = middle + 1
        else:
            right = middle
    return left


@kernel(inner=True, borrows=True)
def _insert(blocks: Any, count: Any, keys: Any, block: Any) -> None:
    place = _before(blocks, count, keys, keys[block])
    for at in range(count, place, -1):
        blocks[at] = blocks[at - 1]
    blocks[place] = block


@kernel(inner=True, borrows=True)
def _remove(blocks: Any, count: Any, keys: Any, block: Any) -> None:
    place = _before(blocks, count, keys, keys[block])
    while blocks[place] != block:
        place += 1
    for at in range(place, count - 1):
        blocks[at] = blocks[at + 1]


@kernel(inner=True, borrows=True)
def _meeting(blocks: Any, start: Any, end: Any, block: Any, near: Any) -> Any:
    """Fills `near` with those of some blocks that are alive with one, and counts them."""
    count, low, high = 0, start[block], end[block]
    for other in blocks:
        if start[other] < high and low < end[other]:
            near[count] = other
            count += 1
    return count


@kernel(inner=True, borrows=True)
def _cheapest(
    block: Any, near: Any, blocks: Any, offsets: Any, matters: Any, ceiling: Any, peak: Any, horizon: Any, random: Any, noise: Any
) -> tuple[Any, Any]:
    """The best place of a block and what it costs: on top of a neighbour or the floor, beneath a neighbour or the ceiling.

    In its way at offset x are the neighbours that start below x + size, less those that end at or below x: two running sums.
    """
    (by_low, by_high), (size, start, end, align, _) = near, blocks
    count, own, step = len(by_low), size[block], align[block]
    best_offset, best_cost, best_far = 0, _HELD, np.inf
    for above in range(2):
        lower = ended = 0
        cost = 0
        for at in range(-1 + above, count + above):
            other_start, other_end = -1, horizon
            if 0 <= at < count:
                other = by_low[at] if above else by_high[at]
                other_start, other_end = start[other], end[other]
                offset = (offsets[other] - own) // step * step if above else -(-(offsets[other] + size[other]) // step) * step
            else:
                offset = (ceiling - own) // step * step if above else 0
            if offset < 0:
                continue
            if offset + own > ceiling:
                break
            while lower < count and offsets[by_low[lower]] < offset + own:
                cost += matters[by_low[lower]]
                lower += 1
            while ended < count and offsets[by_high[ended]] + size[by_high[ended]] <= offset:
                cost -= matters[by_high[ended]]
                ended += 1
            if cost > best_cost:
                continue
            far = mismatch(start[block], end[block], other_start, other_end, peak) * (1.0 + noise * _uniform(random))
            if cost < best_cost or far < best_far:
                best_offset, best_cost, best_far = offset, cost, far
    return best_offset, best_cost
