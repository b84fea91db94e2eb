"""Repeated work: how often an operator's result is computed when the operator that reads it runs tile by tile (AGO, section III-B).

A tile of the downstream operator needs a tile of the upstream one. An element is needed by several tiles in two cases: along a loop of the
downstream operator that does not index it (the output channels of a convolution), or in windows that overlap (a kernel of more than one
position). Where neither is cut, nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod

from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.nests import Index, Nest, nest_of
from lowtide.ir.operators.shapes import ints


@dataclass(frozen=True, slots=True)
class Window:
    """Positions of a loop that need overlapping parts of one dimension."""

    dim: int  # of the tensor that is read
    loop: str  # that moves the window
    step: int  # from one position to the next
    span: int  # elements from the first that a position needs to the last

    def needed(self, positions: int) -> int:
        """Elements that so many positions side by side need."""
        return (positions - 1) * self.step + self.span


@dataclass(frozen=True, slots=True)
class Reuse:
    """Along which loops of an operator the elements of one of its arguments are needed again."""

    again: tuple[str, ...]  # loops that do not index it
    windows: tuple[Window, ...]

    @property
    def untiled(self) -> frozenset[str]:
        """Loops that must stay whole, or what is upstream is repeated."""
        return frozenset((*self.again, *(window.loop for window in self.windows)))


class Intensive(Enum):
    """The paper's two categories of downstream operators (section III-B2), and what is neither."""

    WINDOWED = "windows overlap, and no loop reads an element again: depthwise convolutions, pooling"
    POINTWISE = "loops read an element again, and no windows overlap: pointwise convolutions, products of matrices"
    MAPPED = "each element is read once"
    NEITHER = "both: a convolution over space and channels"


def reuse_of(node: Node, value: Value) -> Reuse | None:
    """How `node` reads `value`; None where its loops are not known. Raises CheckError where a shape is symbolic."""
    nest = nest_of(node)
    access = nest.access(value)
    if access is None:
        return None
    used = {loop for index in access.dims for loop, _ in index}
    again = tuple(loop.name for loop in nest.loops if not loop.reduces and loop.extent > 1 and loop.name not in used)
    found = (_window(nest, dim, index) for dim, index in enumerate(access.dims))
    return Reuse(again, tuple(window for window in found if window is not None))


def _window(nest: Nest, dim: int, index: Index) -> Window | None:
    """The window along a dimension; None where positions do not overlap."""
    moving = [(name, step) for name, step in index if not nest.loop(name).reduces]
    inner = [(name, step) for name, step in index if nest.loop(name).reduces and nest.loop(name).extent > 1]
    span = 1 + sum((nest.loop(name).extent - 1) * step for name, step in inner)
    if len(moving) != 1 or not inner or span <= moving[0][1] or nest.loop(moving[0][0]).extent == 1:
        return None
    return Window(dim, *moving[0], span)


def category(node: Node, value: Value) -> Intensive | None:
    """Which kind of downstream operator a node is for what it reads; None where its loops are not known."""
    reuse = reuse_of(node, value)
    if reuse is None:
        return None
    if reuse.again:
        return Intensive.NEITHER if reuse.windows else Intensive.POINTWISE
    return Intensive.WINDOWED if reuse.windows else Intensive.MAPPED


def repeated(node: Node, value: Value, tile: Mapping[str, int]) -> float:
    """How often an element of `value` is computed on average, where `node` runs in tiles of these extents: 1.0 is no repeated work.

    Loops that `tile` lacks stay whole. Raises ValueError where the loops of the node are not known, or a tile is empty.
    """
    reuse, nest = reuse_of(node, value), nest_of(node)
    if reuse is None:
        raise ValueError(f"expected an operator whose loops are known, got {node.op}")
    if any(extent < 1 for extent in tile.values()):
        raise ValueError(f"expected tiles of one or more, got {dict(tile)}")
    shape = ints(node, value)
    times = prod(-(-nest.loop(name).extent // tile[name]) for name in reuse.again if name in tile)
    return float(times) * prod(_overlap(window, nest, tile, shape[window.dim]) for window in reuse.windows)


def _overlap(window: Window, nest: Nest, tile: Mapping[str, int], extent: int) -> float:
    """How often an element along a window's dimension is needed, borders within the tensor."""
    positions = nest.loop(window.loop).extent
    size = min(tile.get(window.loop, positions), positions)
    if size == positions:
        return 1.0
    whole = min(window.needed(positions), extent)
    tiles = (min(size, positions - start) for start in range(0, positions, size))
    return sum(min(window.needed(each), extent) for each in tiles) / whole
