"""Points of a range: those at which orders are solved, and those at which a family is searched and judged.

Orders are solved at all corners, and between them at numbers that grow by equal factors. No limit changes any of them.
"""

from __future__ import annotations

from itertools import product
from typing import TypeAlias

from lowtide.ir.shapes.dimension import Dimension, Dimensions

ShapePoint: TypeAlias = "dict[str, int]"  # by dimension


def sample_points(dimensions: Dimensions, most: int = 32) -> tuple[ShapePoint, ...]:
    """About `most` points, all corners among them, those of the largest numbers first; a grid of as many numbers for each dimension."""
    count = 2
    while dimensions and (count + 1) ** len(dimensions) <= most:
        count += 1
    grid = product(*(reversed(_numbers(each, count)) for each in dimensions))
    return tuple({each.name: number for each, number in zip(dimensions, numbers, strict=True)} for numbers in grid)


def _numbers(dimension: Dimension, count: int) -> list[int]:
    """About `count` numbers of a range, ascending, both ends among them."""
    first, last = max(dimension.least, 1), max(dimension.most, 1)
    between = {round(first * (last / first) ** (step / (count - 1))) for step in range(count)}
    inside = {min(max(number, dimension.least), dimension.most) for number in between}
    return sorted({*inside, dimension.least, dimension.most})


_ALL, _BETWEEN = 16, 12


def largest(dimensions: Dimensions) -> ShapePoint:
    """The point of the most of each dimension."""
    return {each.name: each.most for each in dimensions}


def smallest(dimensions: Dimensions) -> ShapePoint:
    """The point of the least of each dimension."""
    return {each.name: each.least for each in dimensions}


def on_the_way(dimensions: Dimensions, share: float) -> ShapePoint:
    """The point so far from the smallest to the largest: every dimension grows by equal factors."""
    point = {}
    for each in dimensions:
        first, last = max(each.least, 1), max(each.most, 1)
        point[each.name] = min(max(round(first * (last / first) ** share), each.least), each.most)
    return point


def judged_at(dimensions: Dimensions) -> tuple[ShapePoint, ...]:
    """The largest point first; samples of the whole range; and some on the way from the smallest to the largest."""
    points = [largest(dimensions), *sample_points(dimensions, _ALL), *(on_the_way(dimensions, step / _BETWEEN) for step in range(_BETWEEN))]
    return tuple({tuple(point.values()): point for point in points}.values())
