"""Points of a range at which a family is judged: over all of it, and close by where a limit begins to bind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lowtide.ir.shapes.dimension import Dimensions
from lowtide.schedule.points import Point, sample_points

_ALL, _BETWEEN = 16, 12
_HALVINGS = 20


def largest(dimensions: Dimensions) -> Point:
    """The point of the most of each dimension."""
    return {each.name: each.most for each in dimensions}


def smallest(dimensions: Dimensions) -> Point:
    """The point of the least of each dimension."""
    return {each.name: each.least for each in dimensions}


def on_the_way(dimensions: Dimensions, share: float) -> Point:
    """The point so far from the smallest to the largest: every dimension grows by equal factors."""
    found = {}
    for each in dimensions:
        first, last = max(each.least, 1), max(each.most, 1)
        found[each.name] = min(max(round(first * (last / first) ** share), each.least), each.most)
    return found


def last_share(dimensions: Dimensions, fits: Callable[[Mapping[str, int]], bool]) -> float:
    """How far one may go on that way, so that all that was passed fits as far as halving tells; -1 where nothing does."""
    if not fits(smallest(dimensions)):
        return -1.0
    if fits(largest(dimensions)):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(on_the_way(dimensions, middle)) else (low, middle)
    return low


def judged_at(dimensions: Dimensions, begins: float, ends: float) -> tuple[Point, ...]:
    """The largest point first; samples of the whole range; and on the way some from where a limit begins to bind to where it ends."""
    between = [on_the_way(dimensions, begins + (ends - begins) * step / _BETWEEN) for step in range(_BETWEEN + 1)] if ends > begins else []
    found = [largest(dimensions), *sample_points(dimensions, _ALL), *between]
    return tuple({tuple(point.values()): point for point in found}.values())
