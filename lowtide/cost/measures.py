"""What the nodes of a graph over dimensions need and take: measured on a grid of points, and what follows of that in between.

A workspace that is the same multiple of the bytes of something that its node reads or makes, at every point that was measured, is taken to
be that everywhere: most are copies of an argument or of a result. One that is nearly such a multiple, as a convolution's copies with room
for each thread beside them, is the multiple and a rest. The rest, and every other workspace, grows evenly if points within the range lie on
lines between its ends, and is on these lines everywhere. Else it is that of the largest neighbour: a promise is exact where it was
measured, and above in between. Times are on the lower of two lines, see `Grid`.

A grid of points over a range, and what is known there in between: multilinear, along one dimension a line between neighbours. Lines are
exact for what grows evenly, lines between logarithms for powers. What is a sum of both, as times are (a launch, bytes, products), is below
either, so that the lower one is the nearer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import log
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowtide.errors import CheckError, ShapeError
from lowtide.ir.graph import Graph, Node
from lowtide.ir.shapes.dimension import Dimensions, checked_point
from lowtide.ir.shapes.points import CompiledSizes, compiled
from lowtide.ir.sizes import Size
from lowtide.problems.order import Bytes, Ints, OrderProblem

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
        grid = cls(dimensions, tuple(tuple(sorted({numbers[position] for numbers in given})) for position in range(len(dimensions))))
        for dimension, numbers in zip(dimensions, grid.numbers, strict=True):
            if numbers[:1] != (dimension.least,) or numbers[-1:] != (dimension.most,):
                raise ShapeError(f"points: expected both ends of {dimension} among them, got {', '.join(map(str, numbers)) or 'none'}")
        if sorted(given) != [tuple(point.values()) for point in grid.points]:
            raise ShapeError(f"points: expected a grid, each of {len(grid.points)} points once; got {len(given)}")
        return grid

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
        weights = np.ones(1)
        for number, numbers in zip(checked_point(self.dimensions, point).values(), self.numbers, strict=True):
            weights = np.multiply.outer(weights, _weights(number, numbers, scale)).ravel()
        return weights


def logarithms_of(known: Floats) -> Floats:
    """As `between` takes them."""
    logarithms: Floats = np.log(np.maximum(known, _LEAST))
    return logarithms


def _sum(weights: Floats, known: Floats) -> Floats:
    """[k] times [k] or [k, n]; a product of floats would wait for other threads."""
    total: Floats = np.einsum("k,k...->...", weights, known)
    return total


def _logarithm(number: int) -> float:
    return log(number) if number else -1.0  # below that of 1


def _weights(number: int, numbers: tuple[int, ...], scale: Callable[[int], float]) -> Floats:
    """Of the neighbours of a number on a scale: the nearer one counts for more."""
    weights = np.zeros(len(numbers))
    position = min(bisect_right(numbers, number), len(numbers) - 1)
    if len(numbers) == 1 or numbers[position] == number:
        weights[position] = 1.0
        return weights
    low, high, between = scale(numbers[position - 1]), scale(numbers[position]), scale(number)
    weights[position] = (between - low) / (high - low)
    weights[position - 1] = (high - between) / (high - low)
    return weights


_SAME = 1e-3  # what differs by less is the same multiple; it is counted as the largest
_NEARLY, _ROOM = 0.1, 128 * 2**10  # a rest is at most so much of the workspace, or so many bytes: more may be growth of another kind
_NONE, _ROUNDING = 1e-3, 1e-12  # bytes, and a share of them: what sums of numbers may be off by

Times = NDArray[np.float64]
T = TypeVar("T", np.int64, np.float64)


@dataclass(frozen=True, eq=False)
class Measures:
    """What the nodes of a graph need and take over the ranges of its dimensions."""

    grid: Grid
    workspace_bytes: Bytes  # [k, n] by point of the grid and node
    node_us: Times  # [k, n]; [k, 0] where times do not matter
    columns: Ints  # [n] which workspace a node has: equal ones are one column; -1 where it never needs any
    scaled: tuple[tuple[Size, float], ...]  # [columns] so many times the bytes of a size
    rest: Times  # [k, columns] and so much beside, by point of the grid
    is_even: NDArray[np.bool_]  # [columns] whether the rest grows evenly

    @classmethod
    def of(cls, graph: Graph, points: Sequence[Mapping[str, int]], workspace_bytes: ArrayLike, node_us: ArrayLike = ()) -> Measures:
        """Of the nodes of a graph, measured at points [k] that are a grid over its range: [k, n] bytes, and microseconds if they matter.

        Raises ShapeError where the points are no grid, CheckError for another number of points or nodes.
        """
        grid = Grid.of(graph.dimensions, points)
        order, shape = grid.positions(points), (len(points), len(graph.nodes))
        spaces = _checked("workspace_bytes", np.asarray(workspace_bytes, np.int64), shape)[order]
        sizes = sorted({size for node in graph.nodes for size in _sizes(node)}, key=str)
        numbers = np.array([compiled(tuple(sizes), graph.dimensions)(*point.values()) for point in grid.points], np.float64)
        columns = _Columns(dict(zip(sizes, numbers.T, strict=True)))
        numbered = np.array([columns.of(node, spaces[:, position]) for position, node in enumerate(graph.nodes)], np.int32)
        rest = np.array([each.rest for each in columns.entries], np.float64).reshape(-1, len(points)).T
        scaled = tuple((each.size, each.factor) for each in columns.entries)
        measures = cls(grid, spaces, np.empty((len(points), 0)), numbered, scaled, rest, _is_even(grid, rest))
        return measures.timed(points, node_us) if np.size(node_us) else measures

    def timed(self, points: Sequence[Mapping[str, int]], node_us: ArrayLike) -> Measures:
        """The same, knowing what nodes take at these points [k, n]. Raises CheckError for another number of points or nodes."""
        times = _checked("node_us", np.asarray(node_us, np.float64), self.workspace_bytes.shape)
        return replace(self, node_us=times[self.grid.positions(points)])

    def columns_at(self, point: Mapping[str, int]) -> Bytes:
        """[columns] the workspaces that there are, in bytes, at any point of the range. Raises ShapeError for a wrong point."""
        numbers = self._sizes_at(*checked_point(self.grid.dimensions, point).values())
        weights = self.grid.weights(point)
        rest = np.where(self.is_even, weights @ self.rest, self.rest[weights > 0].max(axis=0))
        both = np.array(numbers, np.float64) * self._factors + rest
        workspaces: Bytes = np.ceil(both - _NONE).astype(np.int64)
        return workspaces

    def workspaces_at(self, point: Mapping[str, int]) -> tuple[int, ...]:
        """[n] the workspace of each node at any point of the range. Raises ShapeError for a wrong point."""
        workspaces = np.append(self.columns_at(point), 0)[self.columns]  # the last is what needs none
        return tuple(workspaces.tolist())

    def with_workspaces(self, problem: OrderProblem, point: Mapping[str, int]) -> OrderProblem:
        """An ordering problem of the same nodes at a point with what they need there. Raises ShapeError for a wrong point."""
        spaces = np.array(self.workspaces_at(point), np.int64)
        spaces.setflags(write=False)
        return replace(problem, workspace_bytes=spaces)

    def times_at(self, point: Mapping[str, int]) -> tuple[float, ...]:
        """[n] the microseconds of each node at any point of the range; empty where they do not matter. Raises ShapeError."""
        return tuple(self.us_at(point).tolist())

    def us_at(self, point: Mapping[str, int]) -> Times:
        return self.grid.between(point, self.node_us, self._logarithms)

    @property
    def is_timed(self) -> bool:
        return self.node_us.size > 0

    @cached_property
    def _logarithms(self) -> Times:
        return logarithms_of(self.node_us)

    @cached_property
    def _factors(self) -> Times:
        return np.array([factor for _, factor in self.scaled], np.float64)

    @cached_property
    def _sizes_at(self) -> CompiledSizes:
        return compiled(tuple(size for size, _ in self.scaled), self.grid.dimensions)


def _is_even(grid: Grid, rest: Times) -> NDArray[np.bool_]:
    """[columns] whether all points lie on lines between the ends of the range, of which points between them must tell."""
    if any(len(numbers) == 2 and numbers[1] - numbers[0] > 1 for numbers in grid.numbers):
        return np.asarray((rest == rest[:1]).all(axis=0))
    ends = Grid(grid.dimensions, tuple(tuple(dict.fromkeys((numbers[0], numbers[-1]))) for numbers in grid.numbers))
    places = [grid.points.index(point) for point in ends.points]
    lines = np.array([ends.weights(point) for point in grid.points]) @ rest[places]
    return np.asarray((np.abs(lines - rest) <= _NONE + _ROUNDING * np.abs(rest)).all(axis=0))


class _Column(NamedTuple):
    """A workspace over the range: so many times the bytes of a size, and the rest by point of the grid."""

    size: Size
    factor: float
    rest: tuple[float, ...]


class _Columns:
    """The distinct workspaces, numbered as they come."""

    def __init__(self, numbers: Mapping[Size, Times]) -> None:
        self._numbers = numbers  # [k] of each size
        self.entries: dict[_Column, int] = {}

    def of(self, node: Node, workspace_bytes: Bytes) -> int:
        """The number of a node's workspace [k]; -1 for none."""
        if not workspace_bytes.any():
            return -1
        column = self._column(node, workspace_bytes)
        return self.entries.setdefault(column, len(self.entries))

    def _column(self, node: Node, workspace_bytes: Bytes) -> _Column:
        alone = _Column(0, 0.0, tuple(workspace_bytes.tolist()))
        if len(set(alone.rest)) == 1:
            return alone
        split = [_split(size, self._numbers[size], workspace_bytes) for size in _sizes(node)]
        nearest = min(split, key=lambda column: max(map(abs, column.rest)), default=alone)
        return nearest if bool((np.abs(nearest.rest) <= np.maximum(workspace_bytes * _NEARLY, _ROOM)).all()) else alone


def _split(size: Size, numbers: Times, workspace_bytes: Bytes) -> _Column:
    """A workspace as a multiple of a size, and the rest. What has no bytes at a point says nothing of multiples there."""
    there = numbers > 0
    ratios = workspace_bytes[there] / numbers[there]
    if not workspace_bytes[~there].any() and (not there.any() or ratios.min() >= ratios.max() * (1 - _SAME)):
        return _Column(size, float(ratios.max(initial=0.0)), (0.0,) * len(numbers))
    least, most = numbers.argmin(), numbers.argmax()
    span = max(float(numbers[most] - numbers[least]), 1.0)
    factor = float(workspace_bytes[most] - workspace_bytes[least]) / span
    return _Column(size, factor, tuple((workspace_bytes - factor * numbers).tolist()))


def _sizes(node: Node) -> Iterator[Size]:
    """The sizes that a workspace may be a multiple of: of what the node makes, then of what it reads; each once."""
    values = (*(value for value in node.outputs if value is not None), *node.inputs)
    return iter(dict.fromkeys(value.storage.nbytes for value in values if not isinstance(value.storage.nbytes, int)))


def _checked(name: str, given: NDArray[T], shape: tuple[int, ...]) -> NDArray[T]:
    if given.shape != shape:
        raise CheckError(f"{name}: expected {shape[0]} points and {shape[1]} nodes, got an array of shape {given.shape}")
    return given
