"""What repeats work: where an operator's result is computed again when the operator that reads it runs tile by tile (AGO, section III-B).

A tile of the downstream operator needs a tile of the upstream one. An element is needed by several tiles in two cases: along a loop of the
downstream operator that does not index it (the output channels of a convolution), or in windows that overlap (a kernel of more than one
position). Where neither is cut, nothing is computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.nests import Index, Nest
from lowtide.ir.operators.nodes import nest_of


@dataclass(frozen=True, slots=True)
class Window:
    """Positions of a loop that need overlapping parts of one dimension."""

    dim: int  # of the tensor that is read
    loop: str  # that moves the window
    step: int  # from one position to the next
    span: int  # elements from the first that a position needs to the last


@dataclass(frozen=True, slots=True)
class Reuse:
    """Along which loops of an operator the elements of one of its arguments are needed again."""

    again: tuple[str, ...]  # loops that do not index it
    windows: tuple[Window, ...]


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
