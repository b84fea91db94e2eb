"""Named dimensions, each with its range; points, a number for each; and which extents of a batch's tensors are dimensions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lowtide.errors import ShapeError

_LIMIT = 10**18
_NAME = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True, slots=True)
class DimensionSteps:
    """What a dimension counts: an extent of `step` times the dimension's number, and `offset` more."""

    name: str  # of the extent, as users call it
    step: int
    offset: int


@dataclass(frozen=True, slots=True)
class Dimension:
    """A size that differs from batch to batch: a whole number from `least` to `most`."""

    name: str  # by which expressions call it
    least: int
    most: int
    steps: DimensionSteps | None = None  # of the extent that it counts; None where it is that extent

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ShapeError(f"expected an identifier as the name of a dimension, got {self.name!r}")
        if not 0 <= self.least <= self.most < _LIMIT:
            got = f"{self.least} to {self.most}"
            raise ShapeError(f"dimension {self.name}: expected a range of numbers from 0 to below 10**18, the least first; got {got}")

    @classmethod
    def of_extents(cls, name: str, first: int, last: int, step: int = 1) -> Dimension:
        """Of an extent that is `first`, `first + step` and so on up to `last`: where the step is not 1, the number of its steps.

        Raises ShapeError where there is no such extent.
        """
        if step == 1:
            return cls(name, first, last)
        if step < 1 or not 0 <= first <= last:
            raise ShapeError(
                f"dimension {name}: expected a range of numbers from 0 on, the least first, and a step of 1 or more; "
                f"got {first} to {last} by {step}"
            )
        return cls(f"{name}_by_{step}", first // step, first // step + (last - first) // step, DimensionSteps(name, step, first % step))

    @property
    def extent_name(self) -> str:
        return self.name if self.steps is None else self.steps.name

    def extent(self, number: Any) -> Any:
        return number if self.steps is None else number * self.steps.step + self.steps.offset

    def number(self, extent: int) -> int | None:
        """What the dimension is where the extent is so large; None where it never is."""
        step, offset = (1, 0) if self.steps is None else (self.steps.step, self.steps.offset)
        number = (extent - offset) // step
        return number if self.least <= number <= self.most and number * step + offset == extent else None

    def number_text(self, number: int) -> str:
        """A number as users are told it: "length = 512"."""
        return f"{self.extent_name} = {self.extent(number)}"

    @property
    def ranged(self) -> str:
        """The extent and its range as users are told them: "side from 64 to 256 in steps of 8"."""
        return f"{self.extent_name} {self.extents.removeprefix('a number ')}"

    @property
    def extents(self) -> str:
        """All that the extent may be, as users are told."""
        by = "" if self.steps is None else f" in steps of {self.steps.step}"
        return f"a number from {self.extent(self.least)} to {self.extent(self.most)}{by}"

    @property
    def symbol(self) -> Any:
        """The dimension in an expression: an integer of 0 or more, as one that is read from text."""
        import sympy  # takes a third of a second, and most programs have no dimensions

        return sympy.Symbol(self.name, integer=True, nonnegative=True)

    def __str__(self) -> str:
        return f"{self.name} in {self.least}..{self.most}"


Dimensions: TypeAlias = "tuple[Dimension, ...]"  # of distinct names


def checked_dimensions(dimensions: Dimensions) -> Dimensions:
    """Those dimensions. Raises ShapeError where two are named alike."""
    names = [each.name for each in dimensions]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ShapeError(f"expected dimensions of different names, got two named {twice}: tie them by giving one where both are meant")
    return dimensions


def checked_point(dimensions: Dimensions, point: Mapping[str, int]) -> dict[str, int]:
    """The number of each dimension, in their order. Raises ShapeError where one is unknown, missing, no int, or out of its range."""
    known = {each.name for each in dimensions}
    for name in point:
        if name not in known:
            raise ShapeError(f"expected numbers for {_listed(dimensions)}, got one for {name!r}, which is no dimension here")
    for each in dimensions:
        if each.name not in point:
            raise ShapeError(f"expected a number for each of {_listed(dimensions)}, got none for {each.name}")
        _check_number(each, point[each.name])
    return {each.name: int(point[each.name]) for each in dimensions}


def _check_number(dimension: Dimension, number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool):
        raise ShapeError(f"dimension {dimension.name}: expected a whole number, got {number!r}")
    if not dimension.least <= number <= dimension.most:
        expected = f"expected a number from {dimension.least} to {dimension.most}"
        raise ShapeError(f"dimension {dimension.name}: {expected}, got {number}: stay within, or declare a wider range")


def _listed(dimensions: Dimensions) -> str:
    return ", ".join(map(str, dimensions)) or "no dimensions, since all sizes are numbers"


@dataclass(frozen=True, slots=True)
class VaryingExtent:
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

    def without(self, name: str) -> Varying:
        """The same but for one dimension, whose number does not vary."""
        left = tuple(each for each in self.dimensions if each.name != name)
        names = {each.extent_name for each in left}
        return Varying(left, tuple(axis for axis in self.axes if axis.name in names))

    def point(self, shapes: Sequence[tuple[int, ...] | None]) -> dict[str, int]:
        """The number of each dimension, given the shape of each leaf (None for what is no tensor).

        Raises ShapeError where tied extents differ, or where one is out of its range.
        """
        extents, point = self.extents(shapes), {}
        for each in self.dimensions:
            extent = extents[each.extent_name]
            number = each.number(extent)
            if number is None:
                remedy = "stay within, or declare a wider range"
                raise ShapeError(f"dimension {each.extent_name}: expected {each.extents}, got {extent}: {remedy}")
            point[each.name] = number
        return point

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
        extents: dict[str, VaryingExtent] = {}
        numbers: dict[str, int] = {}
        for axis in self.axes:
            shape = shapes[axis.leaf]
            if shape is None or axis.dim >= len(shape):
                raise ShapeError(f"dimension {axis.name}: expected a tensor with a dimension {axis.dim} at batch {axis.where}, got {shape}")
            number = shape[axis.dim]
            if numbers.setdefault(axis.name, number) != number:
                other = extents[axis.name]
                raise ShapeError(
                    f"dimension {axis.name}: expected equal extents, got {numbers[axis.name]} in dimension {other.dim} of batch "
                    f"{other.where} and {number} in dimension {axis.dim} of batch {axis.where}: they are tied by their name; where they "
                    "may differ, give each a name and a range of its own in `dynamic`"
                )
            extents.setdefault(axis.name, axis)
        return numbers


FIXED = Varying()  # nothing differs
