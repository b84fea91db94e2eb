"""The placement problem, bare: buffers with sizes and lifetimes as integer arrays, to be given addresses in one arena.

Two buffers whose half-open lifetimes `[start, end)` share a step may not share a byte. A buffer of no bytes or of an empty lifetime
shares nothing with anybody, and may lie anywhere in the arena. Offsets count from the arena's start, which is taken to be aligned to
everything.

`PlaceProblem.of` builds and checks a problem, `files` reads and writes it, `check_placement` goes over what a placer answers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowtide.errors import CheckError, FormatError

Ints = NDArray[np.int64]
FREE = -1  # the fixed offset of a buffer that may lie anywhere
_MAX = 2**62  # sums of sizes and offsets stay below, so that no kernel overflows


@dataclass(frozen=True, eq=False)
class PlaceProblem:
    """n buffers to be placed in the smallest arena. Its arrays are read-only."""

    names: tuple[str, ...]  # [n] for messages and files: not always unique
    size_bytes: Ints  # [n]
    start: Ints  # [n] the first step at which each buffer is in use
    end: Ints  # [n] the first step at which it no longer is
    align_bytes: Ints  # [n] its offset is a multiple of this
    fixed_bytes: Ints  # [n] the offset that it must have, or FREE

    @classmethod
    def of(
        cls,
        size_bytes: ArrayLike,
        start: ArrayLike,
        end: ArrayLike,
        *,
        names: Sequence[str] | None = None,
        align_bytes: ArrayLike = 1,
        fixed_bytes: ArrayLike = FREE,
    ) -> PlaceProblem:
        """The problem of buffers that live over `[start, end)`; `align_bytes` and `fixed_bytes` are by buffer, or one for all.

        Raises FormatError, which names the buffer, for any of these:

        - arrays of different lengths, a number that is no integer, a life that ends before it starts
        - a negative size, or sizes that add up to 2**62 bytes or more
        - an alignment below 1, a fixed offset that is not aligned or below 0
        - two fixed buffers on the same bytes at the same step
        """
        size = _ints("size_bytes", size_bytes)
        n = len(size)
        problem = cls(
            names=tuple(map(str, range(n))) if names is None else tuple(names),
            size_bytes=size,
            start=_ints("start", start),
            end=_ints("end", end),
            align_bytes=_ints("align_bytes", align_bytes, n),
            fixed_bytes=_ints("fixed_bytes", fixed_bytes, n),
        )
        _check(problem)
        return problem

    @property
    def buffer_count(self) -> int:
        return len(self.size_bytes)

    @cached_property
    def live_bytes(self) -> tuple[Ints, Ints]:
        """The steps at which something starts or ends, ascending, and the bytes alive from each of them to the next."""
        steps, where = np.unique(np.concatenate([self.start, self.end]), return_inverse=True)
        change = np.zeros(len(steps), np.int64)
        np.add.at(change, where[: self.buffer_count], self.size_bytes)
        np.subtract.at(change, where[self.buffer_count :], self.size_bytes)
        return steps, np.cumsum(change)

    @cached_property
    def lower_bound_bytes(self) -> int:
        """No arena is smaller: the most bytes alive at one step, the largest buffer, or where the highest fixed buffer ends."""
        alive = int(self.live_bytes[1].max(initial=0))
        fixed_ends = (self.fixed_bytes + self.size_bytes)[self.fixed_bytes != FREE]
        return max(alive, int(self.size_bytes.max(initial=0)), int(fixed_ends.max(initial=0)))


def check_buffer(name: str, size: int, start: int, end: int, align: int = 1, fixed: int = FREE) -> None:
    """Raises FormatError naming the buffer where one of its numbers cannot be."""
    if not 0 <= size < _MAX:
        raise FormatError(f"buffer {name}: expected a size from 0 to 2**62 bytes, got {size}")
    if not -_MAX < start <= end < _MAX:
        raise FormatError(f"buffer {name}: expected a life that starts before it ends, got [{start}, {end})")
    if not 1 <= align < _MAX:
        raise FormatError(f"buffer {name}: expected an alignment of 1 byte or more, got {align}")
    if fixed != FREE and (not 0 <= fixed < _MAX or fixed % align):
        raise FormatError(f"buffer {name}: expected a fixed offset that is a multiple of its alignment {align}, got {fixed}")


def _ints(what: str, values: ArrayLike, count: int | None = None) -> Ints:
    """`values` as a read-only array of int64, one number repeated `count` times."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise FormatError(f"{what}: expected integers below 2**63, got {array.dtype}")
    if array.ndim == 0 and count is not None:
        array = np.full(count, array)
    if array.ndim != 1:
        raise FormatError(f"{what}: expected one dimension, got the shape {array.shape}")
    if array.dtype == np.uint64 and array.size and int(array.max()) >= _MAX:
        raise FormatError(f"{what}: expected integers below 2**62, got {int(array.max())}")
    copy = array.astype(np.int64)
    copy.setflags(write=False)
    return copy


def _check(problem: PlaceProblem) -> None:
    n = problem.buffer_count
    for what in ("names", "start", "end", "align_bytes", "fixed_bytes"):
        if len(getattr(problem, what)) != n:
            raise FormatError(f"{what}: expected one for each of {n} buffers, got {len(getattr(problem, what))}")
    bad = (problem.size_bytes < 0) | (problem.size_bytes >= _MAX) | (problem.start > problem.end) | (problem.align_bytes < 1)
    bad |= (abs(problem.start) >= _MAX) | (abs(problem.end) >= _MAX) | (problem.align_bytes >= _MAX)
    are_fixed = problem.fixed_bytes != FREE
    bad |= are_fixed & (
        (problem.fixed_bytes < 0) | (problem.fixed_bytes >= _MAX) | (problem.fixed_bytes % np.maximum(problem.align_bytes, 1) != 0)
    )
    for buffer in np.flatnonzero(bad)[:1]:
        size, start, end, align, fixed = (
            int(each[buffer]) for each in (problem.size_bytes, problem.start, problem.end, problem.align_bytes, problem.fixed_bytes)
        )
        check_buffer(problem.names[buffer], size, start, end, align, fixed)
    total = sum(problem.size_bytes.tolist()) + sum((problem.align_bytes - 1).tolist())
    if total >= _MAX:
        raise FormatError(f"expected sizes that add up to less than 2**62 bytes, got {total}")
    _check_fixed(problem, np.flatnonzero(are_fixed & (problem.size_bytes > 0) & (problem.start < problem.end)))


def _check_fixed(problem: PlaceProblem, fixed_ids: NDArray[np.intp]) -> None:
    """Raises FormatError where two buffers of fixed offsets meet."""
    low, high = problem.fixed_bytes[fixed_ids], (problem.fixed_bytes + problem.size_bytes)[fixed_ids]
    start, end = problem.start[fixed_ids], problem.end[fixed_ids]
    for place in range(1, len(fixed_ids)):
        meets = (start[:place] < end[place]) & (start[place] < end[:place]) & (low[:place] < high[place]) & (low[place] < high[:place])
        for other in np.flatnonzero(meets)[:1]:
            first, second = problem.names[fixed_ids[other]], problem.names[fixed_ids[place]]
            raise FormatError(f"buffers {first} and {second}: expected fixed offsets apart, got both on byte {max(low[other], low[place])}")


def check_placement(problem: PlaceProblem, offsets: Iterable[SupportsIndex], arena_bytes: int) -> None:
    """Raises CheckError, naming buffers, unless every buffer lies in the arena, aligned, where it is fixed, and alone on its bytes.

    At each step the buffers alive are kept in order of their offsets; as they do not overlap, a newcomer can only meet its two neighbours.
    """
    at = [int(each) for each in offsets]
    if len(at) != problem.buffer_count:
        raise CheckError(f"expected offsets of {problem.buffer_count} buffers, got {len(at)}")
    sizes, starts, ends = problem.size_bytes.tolist(), problem.start.tolist(), problem.end.tolist()
    each = zip(at, sizes, problem.align_bytes.tolist(), problem.fixed_bytes.tolist(), strict=True)
    for buffer, (offset, size, align, fixed) in enumerate(each):
        if offset < 0 or offset + size > arena_bytes:
            _refuse(problem, buffer, f"within the arena of {arena_bytes} bytes, got [{offset}, {offset + size})")
        if offset % align:
            _refuse(problem, buffer, f"an offset that is a multiple of {align}, got {offset}")
        if fixed not in (FREE, offset):
            _refuse(problem, buffer, f"the fixed offset {fixed}, got {offset}")
    living = [buffer for buffer in range(len(at)) if sizes[buffer] and starts[buffer] < ends[buffer]]
    events = sorted([(starts[each], 1, each) for each in living] + [(ends[each], 0, each) for each in living])  # who ends goes first
    alive: list[tuple[int, int]] = []  # (offset, buffer)
    for step, begins, buffer in events:
        if not begins:
            alive.pop(bisect_left(alive, (at[buffer], buffer)))
            continue
        place = bisect_left(alive, (at[buffer], buffer))
        for _, other in alive[max(place - 1, 0) : place + 1]:
            if at[other] < at[buffer] + sizes[buffer] and at[buffer] < at[other] + sizes[other]:
                raise CheckError(f"{_described(problem, at, other)} and {_described(problem, at, buffer)} overlap at step {step}")
        alive.insert(place, (at[buffer], buffer))


def _refuse(problem: PlaceProblem, buffer: int, expected: str) -> NoReturn:
    raise CheckError(f"buffer {problem.names[buffer]}: expected {expected}")


def _described(problem: PlaceProblem, at: list[int], buffer: int) -> str:
    return f"buffer {problem.names[buffer]} at [{at[buffer]}, {at[buffer] + int(problem.size_bytes[buffer])})"


def components(problem: PlaceProblem) -> list[NDArray[np.intp]]:
    """The buffers of each component, by time; those that need no bytes are in none."""
    needed = np.flatnonzero((problem.size_bytes > 0) & (problem.start < problem.end))
    if not len(needed):
        return []
    order = needed[np.argsort(problem.start[needed], kind="stable")]
    ended = np.maximum.accumulate(problem.end[order])
    cuts = np.flatnonzero(problem.start[order][1:] >= ended[:-1]) + 1
    return [np.sort(each) for each in np.split(order, cuts)]


def subproblem_of(problem: PlaceProblem, buffers: NDArray[np.intp]) -> PlaceProblem:
    return PlaceProblem(
        names=tuple(problem.names[each] for each in buffers.tolist()),
        size_bytes=problem.size_bytes[buffers],
        start=problem.start[buffers],
        end=problem.end[buffers],
        align_bytes=problem.align_bytes[buffers],
        fixed_bytes=problem.fixed_bytes[buffers],
    )
