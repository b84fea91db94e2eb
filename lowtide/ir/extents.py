"""Which extents of a batch's tensors differ from batch to batch, and by which dimension each is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.errors import ShapeError
from lowtide.ir.shapes.dimension import Dimension, checked_dimensions


@dataclass(frozen=True, slots=True)
class VaryingExtent:
    """One extent of one tensor of a batch."""

    leaf: int  # which leaf of the flattened batch
    dim: int  # of that tensor
    name: str  # as users call it
    where: str = ""  # the leaf, as messages call it


@dataclass(frozen=True, slots=True)
class Varying:
    """The dimensions of a batch. Axes of one name are tied: they have one extent in every batch, which a dimension is or counts."""

    dimensions: tuple[Dimension, ...] = ()
    axes: tuple[VaryingExtent, ...] = ()

    def __post_init__(self) -> None:
        checked_dimensions(self.dimensions)

    def __bool__(self) -> bool:
        return bool(self.dimensions)

    def of_leaf(self, leaf: int) -> dict[int, str]:
        """The extents of one leaf's tensor that vary, and what they are called."""
        return {axis.dim: axis.name for axis in self.axes if axis.leaf == leaf}

    def point(self, shapes: Sequence[tuple[int, ...] | None]) -> dict[str, int]:
        """The number of each dimension, given the shape of each leaf (None for what is no tensor).

        Raises ShapeError where tied extents differ, or where one is out of its range.
        """
        extents, found = self.extents(shapes), {}
        for each in self.dimensions:
            extent = extents[each.extent_name]
            number = each.number(extent)
            if number is None:
                remedy = "stay within, or declare a wider range"
                raise ShapeError(f"dimension {each.extent_name}: expected {each.extents}, got {extent}: {remedy}")
            found[each.name] = number
        return found

    def has(self, shapes: Sequence[tuple[int, ...] | None]) -> bool:
        """Whether all extents are in their ranges. Raises ShapeError where tied ones differ."""
        extents = self.extents(shapes)
        return all(each.number(extents[each.extent_name]) is not None for each in self.dimensions)

    def is_elsewhere_alike(self, one: Sequence[tuple[int, ...] | None], other: Sequence[tuple[int, ...] | None]) -> bool:
        """Whether two batches have equal shapes but for their dimensions."""
        return all(self._without_dimensions(leaf, *pair) for leaf, pair in enumerate(zip(one, other, strict=True)))

    def _without_dimensions(self, leaf: int, one: tuple[int, ...] | None, other: tuple[int, ...] | None) -> bool:
        if one is None or other is None or len(one) != len(other):
            return one == other
        varies = self.of_leaf(leaf)
        return all(dim in varies or pair[0] == pair[1] for dim, pair in enumerate(zip(one, other, strict=True)))

    def extents(self, shapes: Sequence[tuple[int, ...] | None]) -> dict[str, int]:
        """By name, without a look at ranges. Raises ShapeError where tied ones differ."""
        found: dict[str, VaryingExtent] = {}
        numbers: dict[str, int] = {}
        for axis in self.axes:
            shape = shapes[axis.leaf]
            if shape is None or axis.dim >= len(shape):
                raise ShapeError(f"dimension {axis.name}: expected a tensor with a dimension {axis.dim} at batch {axis.where}, got {shape}")
            number = shape[axis.dim]
            if numbers.setdefault(axis.name, number) != number:
                other = found[axis.name]
                raise ShapeError(
                    f"dimension {axis.name}: expected equal extents, got {numbers[axis.name]} in dimension {other.dim} of batch "
                    f"{other.where} and {number} in dimension {axis.dim} of batch {axis.where}: they are tied by their name; where they "
                    "may differ, give each a name and a range of its own in `dynamic`"
                )
            found.setdefault(axis.name, axis)
        return numbers


FIXED = Varying()  # nothing differs
