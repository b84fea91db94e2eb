"""The archive: every schedule seen that no other beats in both memory and time. Any limit is answered from it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from lowtide.problems.order import Ints
from lowtide.remat.eviction import Bias, ScoreWeights


@dataclass(frozen=True, eq=False)
class Recipe:
    """How eviction made a schedule: from what, and by which rule."""

    base: Ints
    weights: ScoreWeights
    bias: Bias | None = None

    def digest(self, problem: int, limit_bytes: int) -> bytes:
        """Of all that decides what comes out: two recipes of one digest make one schedule."""
        digest = blake2b(_named(self.weights), digest_size=16)
        digest.update(b"%d %d" % (problem, limit_bytes))
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
    """The points that no other beats in both, by ascending peak and descending time."""

    points: list[Point] = field(default_factory=list)
    states: int = 0  # schedules built and costed
    interrupted: bool = False  # the search was stopped by the user
    out_of_time: bool = False  # or by a cap of seconds: what is here then depends on the machine

    def add(self, point: Point) -> bool:
        """Whether the point belongs here; those that it beats are dropped."""
        position = bisect_right(self.points, point.peak_bytes, key=_peak)
        if position and self.points[position - 1].time_us <= point.time_us:
            return False
        start = end = bisect_left(self.points, point.peak_bytes, key=_peak)
        while end < len(self.points) and self.points[end].time_us >= point.time_us:
            end += 1
        self.points[start:end] = [point]
        return True

    def merge(self, other: Archive) -> None:
        for point in other.points:
            self.add(point)
        self.states += other.states
        self.interrupted |= other.interrupted
        self.out_of_time |= other.out_of_time

    def within(self, memory_bytes: int) -> Point | None:
        """The fastest point within so many bytes."""
        position = bisect_right(self.points, memory_bytes, key=_peak)
        return self.points[position - 1] if position else None

    def near(self, memory_bytes: int, count: int) -> list[Point]:
        position = bisect_right(self.points, memory_bytes, key=_peak)
        return self.points[max(0, position - count) : position + count]

    def under(self, time_us: float) -> Point | None:
        """The point of least peak that takes no longer."""
        return next((each for each in self.points if each.time_us <= time_us), None)


@lru_cache(maxsize=64)
def _named(weights: ScoreWeights) -> bytes:
    return repr(weights).encode()


def _peak(point: Point) -> int:
    return point.peak_bytes
