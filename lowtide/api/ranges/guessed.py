"""`dynamic="auto"`: what differs between the batches met so far is a dimension, up to twice the largest number that was met."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from lowtide.api.ranges.said import name_of, shown
from lowtide.ir.shapes.dimension import Dimension
from lowtide.ir.varying import Axis, Varying

Shapes: TypeAlias = "Sequence[tuple[int, ...] | None]"  # by leaf of a batch; None for what is no tensor


def guessed(seen: Sequence[Shapes], paths: Sequence[str]) -> Varying | None:
    """The dimensions of batches of these shapes, whose leaves lie at these paths; None where ranks differ: that is no range.

    Extents that were equal in every batch are taken to be tied.
    """
    names: dict[tuple[int, ...], str] = {}
    axes = []
    for leaf, shapes in enumerate(zip(*seen, strict=True)):
        if len({shape and len(shape) for shape in shapes}) > 1:
            return None
        for dim, numbers in enumerate(zip(*(shape or () for shape in shapes), strict=True)):
            if len(set(numbers)) > 1:
                where = shown(paths[leaf])
                axes.append(Axis(leaf, dim, names.setdefault(numbers, name_of(where, dim)), where))
    return Varying(tuple(Dimension(name, 1, 2 * max(numbers)) for numbers, name in names.items()), tuple(axes))
