"""Points of a range at which a family is searched and judged; no limit has a say in them."""

from __future__ import annotations

from lowtide.ir.shapes.dimension import Dimensions
from lowtide.schedule.points import Point, sample_points

_ALL, _BETWEEN = 16, 12


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


def judged_at(dimensions: Dimensions) -> tuple[Point, ...]:
    """The largest point first; samples of the whole range; and some on the way from the smallest to the largest."""
    found = [largest(dimensions), *sample_points(dimensions, _ALL), *(on_the_way(dimensions, step / _BETWEEN) for step in range(_BETWEEN))]
    return tuple({tuple(point.values()): point for point in found}.values())
