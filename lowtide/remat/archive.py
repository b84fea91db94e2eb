"""The archive: every schedule seen that no other beats in memory, time and what it pins on the host. Any limits are answered from it.

It depends on none: less of the device's or of the host's memory never gives a better answer, as what keeps to the smaller limits keeps to
the larger ones. What is pinned is compared in steps, four from each power of two to the next. So there are few points, and a limit that is
a step, 48 GiB, misses none.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from lowtide.problems.order import Ints
from lowtide.remat.cost import price_of
from lowtide.remat.eviction import Bias, ScoreWeights
from lowtide.remat.problem import RematProblem


@dataclass(frozen=True, eq=False)
class Recipe:
    """How eviction made a schedule: from what, and by which rule."""

    base: Ints
    weights: ScoreWeights
    bias: Bias | None = None

    def digest(self, problem: int, limit_bytes: int, pinned_bytes: int | None = None) -> bytes:
        """Of all that decides what comes out: two recipes of one digest make one schedule."""
        digest = blake2b(_named(self.weights), digest_size=16)
        digest.update(b"%d %d %d" % (problem, limit_bytes, -1 if pinned_bytes is None else pinned_bytes))
        for array in (self.base, *(() if self.bias is None else (self.bias.keep, self.bias.store))):
            digest.update(array.tobytes())
        return digest.digest()


@dataclass(frozen=True, eq=False)
class Point:
    """A schedule with recomputation and swapping, and what it costs."""

    peak_bytes: int
    time_us: float
    problem: int  # which of the problems it is a schedule of
    sequence: Ints
    recipe: Recipe | None = None
    roles: NDArray[np.int8] | None = None  # [m] what each tensor had to do with eviction's choices
    pinned_bytes: int = 0  # on the host

    @classmethod
    def of(
        cls, problem: RematProblem, which: int, sequence: Ints, recipe: Recipe | None = None, roles: NDArray[np.int8] | None = None
    ) -> Point:
        peak_bytes, time_us, pinned_bytes = price_of(problem, sequence)
        return cls(peak_bytes, time_us, which, sequence, recipe, roles, pinned_bytes)

    def padded(self, tensors: int) -> Point:
        """The same schedule for a problem of more tensors, at the end, which it leaves alone."""
        bias, roles = self.recipe.bias if self.recipe else None, self.roles
        if bias is not None:
            bias = Bias(*(np.append(factors, np.ones(tensors - len(factors))) for factors in (bias.keep, bias.store)))
        if roles is not None:
            roles = np.append(roles, np.zeros(tensors - len(roles), np.int8))
        return replace(self, recipe=self.recipe and replace(self.recipe, bias=bias), roles=roles)


@dataclass
class Archive:
    points: list[Point] = field(default_factory=list)  # in memory and time, by ascending peak and descending time
    by_pinned: dict[int, list[Point]] = field(default_factory=dict)  # alike, of those that pin so much and not more than a step less
    states: int = 0  # schedules built and costed
    interrupted: bool = False  # the search was stopped by the user
    out_of_time: bool = False  # or by a cap of seconds: what is here then depends on the machine

    def add(self, point: Point) -> bool:
        """Whether the point belongs here; those that it beats are dropped."""
        step = pinned_step(point.pinned_bytes)
        if any(_is_beaten(points, point) for least, points in self.by_pinned.items() if least <= step):
            return False
        _put(self.by_pinned.setdefault(step, []), point)
        if not _is_beaten(self.points, point):
            _put(self.points, point)
        return True

    def copy(self, states: int | None = None) -> Archive:
        """The same points; the states of this search, or so many. Nothing has stopped it."""
        by_pinned = {step: list(points) for step, points in self.by_pinned.items()}
        return Archive(list(self.points), by_pinned, self.states if states is None else states)

    @classmethod
    def of(cls, points: Iterable[Point], states: int = 0) -> Archive:
        """Of these, as far as none beats another."""
        archive = cls(states=states)
        for point in points:
            archive.add(point)
        return archive

    @property
    def all_points(self) -> Iterator[Point]:
        """Those, too, that are best at something only where the host has a limit; some of those are beaten by what was added later."""
        return (point for step in sorted(self.by_pinned) for point in self.by_pinned[step])

    def pinning(self, pinned_bytes: int) -> list[Point]:
        """What no other beats in memory and time among those that pin no more, by ascending peak and descending time."""
        points: list[Point] = []
        for point in self.all_points:
            if point.pinned_bytes <= pinned_bytes and not _is_beaten(points, point):
                _put(points, point)
        return points

    def merge(self, other: Archive) -> None:
        for point in other.all_points:
            self.add(point)
        self.states += other.states
        self.interrupted |= other.interrupted
        self.out_of_time |= other.out_of_time

    def within(self, memory_bytes: int, pinned_bytes: int | None = None) -> Point | None:
        """The fastest point within so many bytes, and so many that are pinned; of equals the one that pins least."""
        if pinned_bytes is None:
            position = bisect_right(self.points, memory_bytes, key=_peak)
            return self.points[position - 1] if position else None
        best: Point | None = None
        for step in sorted(self.by_pinned):
            points = self.by_pinned[step]
            for position in range(bisect_right(points, memory_bytes, key=_peak) - 1 if step <= pinned_step(pinned_bytes) else -1, -1, -1):
                if points[position].pinned_bytes <= pinned_bytes:
                    best = points[position] if best is None or points[position].time_us < best.time_us else best
                    break
        return best

    def near(self, memory_bytes: int, count: int) -> list[Point]:
        position = bisect_right(self.points, memory_bytes, key=_peak)
        return self.points[max(0, position - count) : position + count]

    def under(self, time_us: float) -> Point | None:
        """The point of least peak that takes no longer."""
        return next((each for each in self.points if each.time_us <= time_us), None)


def pinned_step(pinned_bytes: int) -> int:
    """The least step that is no less: a number of three bits, times a power of two."""
    power = max(0, pinned_bytes.bit_length() - 3)
    return -(-pinned_bytes >> power) << power


def _is_beaten(points: list[Point], point: Point) -> bool:
    """Whether one of these, by ascending peak and descending time, is as good in both."""
    position = bisect_right(points, point.peak_bytes, key=_peak)
    return position > 0 and points[position - 1].time_us <= point.time_us


def _put(points: list[Point], point: Point) -> None:
    """Put one among these that none of them beats, in the place of those that it beats."""
    start = end = bisect_left(points, point.peak_bytes, key=_peak)
    while end < len(points) and points[end].time_us >= point.time_us:
        end += 1
    points[start:end] = [point]


@lru_cache(maxsize=64)
def _named(weights: ScoreWeights) -> bytes:
    return repr(weights).encode()


def _peak(point: Point) -> int:
    return point.peak_bytes
