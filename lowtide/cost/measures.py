"""What the nodes of a graph over dimensions need and take: measured on a grid of points, in between interpolated.

A workspace that is the same multiple of the bytes of something that its node reads or makes, at every point that was measured, is taken to
be that everywhere: most are copies of an argument or of a result. One that is nearly such a multiple, as a convolution's copies with room
for each thread beside them, is the multiple and a rest. Of the rest, and of all other workspaces, what lies between two points is on the
line between them, which is exact for what grows evenly, and above what grows faster. Nothing is ever below what was measured at a point of
the grid. Times are what `grid` says of both lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowtide.cost.grid import Grid, logarithms_of
from lowtide.errors import CheckError
from lowtide.ir.graph import Graph, Node
from lowtide.ir.shapes.dimension import checked_point
from lowtide.ir.shapes.evaluate import Compiled, compiled
from lowtide.ir.sizes import Size
from lowtide.problems.order import Bytes, Ints, OrderProblem

_SAME = 1e-3  # what differs by less is the same multiple; it is counted as the largest
_NEARLY, _ROOM = 0.1, 128 * 2**10  # a rest is at most so much of the workspace, or so many bytes: more may be growth of another kind
_NONE = 1e-3  # bytes: what sums of numbers may be off by

Times = NDArray[np.float64]
Item = TypeVar("Item", np.int64, np.float64)


@dataclass(frozen=True, eq=False)
class Measures:
    """What the nodes of a graph need and take over the ranges of its dimensions."""

    grid: Grid
    workspace_bytes: Bytes  # [k, n] by point of the grid and node
    node_us: Times  # [k, n]; [k, 0] where times do not matter
    columns: Ints  # [n] which workspace a node has: equal ones are one column; -1 where it never needs any
    scaled: tuple[tuple[Size, float], ...]  # [columns] so many times the bytes of a size
    rest: Times  # [k, columns] and so much beside, by point of the grid

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
        rest = np.array([each.rest for each in columns.found], np.float64).reshape(-1, len(points)).T
        scaled = tuple((each.size, each.factor) for each in columns.found)
        made = cls(grid, spaces, np.empty((len(points), 0)), numbered, scaled, rest)
        return made.timed(points, node_us) if np.size(node_us) else made

    def timed(self, points: Sequence[Mapping[str, int]], node_us: ArrayLike) -> Measures:
        """The same, knowing what nodes take at these points [k, n]. Raises CheckError for another number of points or nodes."""
        times = _checked("node_us", np.asarray(node_us, np.float64), self.workspace_bytes.shape)
        return replace(self, node_us=times[self.grid.positions(points)])

    def columns_at(self, point: Mapping[str, int]) -> Bytes:
        """[columns] the workspaces that there are, in bytes, at any point of the range. Raises ShapeError for a wrong point."""
        numbers = self._sizes_at(*checked_point(self.grid.dimensions, point).values())
        both = np.array(numbers, np.float64) * self._factors + self.grid.weights(point) @ self.rest
        found: Bytes = np.ceil(both - _NONE).astype(np.int64)
        return found

    def workspaces_at(self, point: Mapping[str, int]) -> tuple[int, ...]:
        """[n] the workspace of each node at any point of the range. Raises ShapeError for a wrong point."""
        found = np.append(self.columns_at(point), 0)[self.columns]  # the last is what needs none
        return tuple(found.tolist())

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
    def _sizes_at(self) -> Compiled:
        return compiled(tuple(size for size, _ in self.scaled), self.grid.dimensions)


class _Column(NamedTuple):
    """A workspace over the range: so many times the bytes of a size, and the rest by point of the grid."""

    size: Size
    factor: float
    rest: tuple[float, ...]


class _Columns:
    """The distinct workspaces, numbered as they come."""

    def __init__(self, numbers: Mapping[Size, Times]) -> None:
        self._numbers = numbers  # [k] of each size
        self.found: dict[_Column, int] = {}

    def of(self, node: Node, workspace_bytes: Bytes) -> int:
        """The number of a node's workspace [k]; -1 for none."""
        if not workspace_bytes.any():
            return -1
        column = self._column(node, workspace_bytes)
        return self.found.setdefault(column, len(self.found))

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


def _checked(name: str, given: NDArray[Item], shape: tuple[int, ...]) -> NDArray[Item]:
    if given.shape != shape:
        raise CheckError(f"{name}: expected {shape[0]} points and {shape[1]} nodes, got an array of shape {given.shape}")
    return given
