"""Points of a range at which orders are solved: all corners, and between them numbers that grow by equal factors."""

from __future__ import annotations

from itertools import product
from typing import TypeAlias

from lowtide.ir.shapes.dimension import Dimension, Dimensions

Point: TypeAlias = "dict[str, int]"  # by dimension


def sample_points(dimensions: Dimensions, most: int = 32) -> tuple[Point, ...]:
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
