"""A grid of points over a range, and what is known there in between: multilinear, along one dimension a line between neighbours.

Lines are exact for what grows evenly, lines between logarithms for powers. What is a sum of both, as times are (a launch, bytes, products),
is below either, so that the lower one is the nearer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import log
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtide.errors import ShapeError
from lowtide.ir.shapes.dimension import Dimensions, checked_point

Floats: TypeAlias = NDArray[np.float64]
_LEAST = 1e-6  # of what has a logarithm: a millionth of a microsecond


@dataclass(frozen=True)
class Grid:
    """Some numbers of each dimension, and every point that they make."""

    dimensions: Dimensions
    numbers: tuple[tuple[int, ...], ...]  # of each dimension, ascending, its least and its most among them

    @classmethod
    def of(cls, dimensions: Dimensions, points: Sequence[Mapping[str, int]]) -> Grid:
        """The grid that these points are, in whatever order.

        Raises ShapeError for a point out of the range, and where one is missing, given twice, or the ends of a range are not among them.
        """
        given = [tuple(checked_point(dimensions, point).values()) for point in points]
        found = cls(dimensions, tuple(tuple(sorted({numbers[position] for numbers in given})) for position in range(len(dimensions))))
        for dimension, numbers in zip(dimensions, found.numbers, strict=True):
            if numbers[:1] != (dimension.least,) or numbers[-1:] != (dimension.most,):
                raise ShapeError(f"points: expected both ends of {dimension} among them, got {', '.join(map(str, numbers)) or 'none'}")
        if sorted(given) != [tuple(point.values()) for point in found.points]:
            raise ShapeError(f"points: expected a grid, each of {len(found.points)} points once; got {len(given)}")
        return found

    @property
    def points(self) -> tuple[dict[str, int], ...]:
        """[k] all of them; numbers of the last dimension change first."""
        names = [each.name for each in self.dimensions]
        return tuple(dict(zip(names, numbers, strict=True)) for numbers in product(*self.numbers))

    def positions(self, points: Sequence[Mapping[str, int]]) -> list[int]:
        """By point of the grid: where it stands among these, which are the same in another order."""
        there = {tuple(checked_point(self.dimensions, point).values()): position for position, point in enumerate(points)}
        return [there[tuple(point.values())] for point in self.points]

    def weights(self, point: Mapping[str, int]) -> Floats:
        """[k] how much each point counts for this one: 1 in all, and exactly that for a point of the grid. Raises ShapeError."""
        return self._weights(point, float)

    def between(self, point: Mapping[str, int], known: Floats, logarithms: Floats | None = None) -> Floats:
        """What is known of each point, [k] or [k, n], at this one: the lower of what both lines say. Raises ShapeError.

        `logarithms` are those of what is known, where the caller keeps them.
        """
        weights = self.weights(point)
        if weights.max() == 1.0:
            at_point: Floats = known[int(weights.argmax())]
            return at_point
        logs = logarithms_of(known) if logarithms is None else logarithms
        lower: Floats = np.minimum(_sum(weights, known), np.exp(_sum(self._weights(point, _logarithm), logs)))
        return lower

    def _weights(self, point: Mapping[str, int], scale: Callable[[int], float]) -> Floats:
        found = np.ones(1)
        for number, numbers in zip(checked_point(self.dimensions, point).values(), self.numbers, strict=True):
            found = np.multiply.outer(found, _weights(number, numbers, scale)).ravel()
        return found


def logarithms_of(known: Floats) -> Floats:
    """As `between` takes them."""
    found: Floats = np.log(np.maximum(known, _LEAST))
    return found


def _sum(weights: Floats, known: Floats) -> Floats:
    """[k] times [k] or [k, n]; a product of floats would wait for other threads."""
    found: Floats = np.einsum("k,k...->...", weights, known)
    return found


def _logarithm(number: int) -> float:
    return log(number) if number else -1.0  # below that of 1


def _weights(number: int, numbers: tuple[int, ...], scale: Callable[[int], float]) -> Floats:
    """Of the neighbours of a number on a scale: the nearer one counts for more."""
    found = np.zeros(len(numbers))
    position = min(bisect_right(numbers, number), len(numbers) - 1)
    if len(numbers) == 1 or numbers[position] == number:
        found[position] = 1.0
        return found
    low, high, between = scale(numbers[position - 1]), scale(numbers[position]), scale(number)
    found[position] = (between - low) / (high - low)
    found[position - 1] = (high - between) / (high - low)
    return found
