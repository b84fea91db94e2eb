"""`dynamic="auto"`: what differs between the batches met so far is a dimension, up to twice the largest number that was met."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from lowtide.api.ranges.notation import AUTO, name_of, shown
from lowtide.capture.batches import positional_and_keyword
from lowtide.errors import ShapeError
from lowtide.ir import tree
from lowtide.ir.extents import Varying, VaryingExtent
from lowtide.ir.shapes.dimension import Dimension
from lowtide.ir.tree import Leaf

Seen: TypeAlias = "Sequence[tuple[int, ...] | None]"  # by leaf of a batch; None for what is no tensor


def guessed(seen: Sequence[Seen], paths: Sequence[str]) -> Varying | None:
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
                axes.append(VaryingExtent(leaf, dim, names.setdefault(numbers, name_of(where, dim)), where))
    return Varying(tuple(Dimension(name, 1, 2 * max(numbers)) for numbers, name in names.items()), tuple(axes))


def met_so_far(dynamic: Any, batches: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Seen]:
    """The shapes of the example and of further batches, from which ranges are guessed; none where nothing is to be guessed.

    Raises ShapeError for one of other arguments or ranks.
    """
    if dynamic != AUTO:
        return []
    example = tree.flatten((args, kwargs))[0]
    return [_shapes(example), *(_like(example, place, positional_and_keyword(each)) for place, each in enumerate(batches))]


def shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Seen:
    """By leaf of a batch its shape, None for what is no tensor."""
    return _shapes(tree.flatten((args, kwargs))[0])


def _shapes(leaves: Sequence[Leaf]) -> Seen:
    return [tuple(leaf.value.shape) if isinstance(leaf.value, torch.Tensor) else None for leaf in leaves]


def _like(example: Sequence[Leaf], place: int, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> Seen:
    leaves = tree.flatten(batch)[0]
    wanted, got = ([shown(leaf.where) for leaf in each] for each in (example, leaves))
    if wanted != got:
        raise ShapeError(f"batches[{place}]: expected a batch of {', '.join(wanted)} as `batch` is, got {', '.join(got) or 'nothing'}")
    for name, one, other in zip(wanted, _shapes(example), _shapes(leaves), strict=True):
        if (one is None) != (other is None) or len(one or ()) != len(other or ()):
            raise ShapeError(f"batches[{place}]: expected {name} with as many dimensions as in `batch` (shape {one}), got shape {other}")
    return _shapes(leaves)
