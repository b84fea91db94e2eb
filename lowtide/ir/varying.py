"""Which extents of a batch's tensors differ from batch to batch, and by which dimension each is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.errors import ShapeError
from lowtide.ir.shapes.dimension import Dimension, checked_dimensions, checked_point


@dataclass(frozen=True, slots=True)
class Axis:
    """One extent of one tensor of a batch."""

    leaf: int  # which leaf of the flattened batch
    dim: int  # of that tensor
    name: str  # the dimension that it is
    where: str = ""  # the leaf, as messages call it


@dataclass(frozen=True, slots=True)
class Varying:
    """The dimensions of a batch. Axes of one name are tied: they have one extent in every batch."""

    dimensions: tuple[Dimension, ...] = ()
    axes: tuple[Axis, ...] = ()

    def __post_init__(self) -> None:
        checked_dimensions(self.dimensions)

    def __bool__(self) -> bool:
        return bool(self.dimensions)

    def of_leaf(self, leaf: int) -> dict[int, str]:
        """The dimensions of one leaf's tensor, by which of its extents they are."""
        return {axis.dim: axis.name for axis in self.axes if axis.leaf == leaf}

    def point(self, shapes: Sequence[tuple[int, ...] | None]) -> dict[str, int]:
        """The number of each dimension, given the shape of each leaf (None for what is no tensor).

        Raises ShapeError where tied extents differ, or where a number is out of its range.
        """
        found: dict[str, Axis] = {}
        numbers: dict[str, int] = {}
        for axis in self.axes:
            shape = shapes[axis.leaf]
            assert shape is not None, "only tensors have dimensions"
            number = shape[axis.dim]
            if numbers.setdefault(axis.name, number) != number:
                other = found[axis.name]
                raise ShapeError(
                    f"dimension {axis.name}: expected equal extents, got {numbers[axis.name]} in dimension {other.dim} of batch "
                    f"{other.where} and {number} in dimension {axis.dim} of batch {axis.where}: they are tied by their name"
                )
            found.setdefault(axis.name, axis)
        return checked_point(self.dimensions, numbers)


FIXED = Varying()  # nothing differs
