"""`dynamic=` as users write it: which extents of which arguments differ from batch to batch, and within which range.

    dynamic={"input_ids": {1: (16, 2048)}}                   argument, dimension, from and to
    dynamic={"input_ids": {1: ("length", 16, 2048)}, "labels": {1: "length"}}    of one name: tied, equal in every batch
    dynamic={0: {0: ("rows", 2, 64)}}                        an argument by its position
    dynamic={"pixels": {2: ("side", 64, 256, 8), 3: "side"}} with a step: 64, 72, ... 256, as for a network that halves its pictures thrice

An argument is called by its name in a mapping or by its position in a tuple; what lies deeper in it by its path, as messages call it:
"[0]['pixels']". `dynamic="auto"` says nothing yet: `guessed` does, as batches come.

`dynamic="auto"`: what differs between the batches met so far is a dimension, up to twice the largest number that was met.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import torch

from lowtide.capture.batches import positional_and_keyword
from lowtide.errors import ShapeError
from lowtide.ir import tree
from lowtide.ir.shapes.dimension import FIXED, Dimension, Varying, VaryingExtent
from lowtide.ir.tree import Leaf

AUTO = "auto"  # dimensions are what differs between batches
_WISH = 'expected a range (16, 2048), a named range ("length", 16, 2048), one with a step ("side", 64, 256, 8), or the name of one'


def varying_of(dynamic: Mapping[Any, Any] | str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Varying:
    """What a user wrote, for a batch like this one. Raises TypeError and ShapeError, which say what is expected."""
    if dynamic is None or isinstance(dynamic, str):
        return FIXED
    leaves = tree.flatten((args, dict(kwargs)))[0]
    axes = [axis for name, extents in dynamic.items() for axis in _axes(name, extents, leaves)]
    ranges: dict[str, Dimension] = {}
    for each in axes:
        if each.dimension is not None and ranges.setdefault(each.axis.name, each.dimension) != each.dimension:
            raise ShapeError(f"dynamic: expected one range for {each.axis.name}, got {ranges[each.axis.name]} and {each.dimension}")
    for each in axes:
        if each.axis.name not in ranges:
            raise ShapeError(f'dynamic: {each.axis.name} has no range: give it one where it is first named, ("{each.axis.name}", 16, 2048)')
    varying = Varying(tuple(ranges.values()), tuple(each.axis for each in axes))
    varying.point([tuple(leaf.value.shape) if isinstance(leaf.value, torch.Tensor) else None for leaf in leaves])
    return varying


def fixed_beside(varying: Varying, leaves: Sequence[Leaf]) -> str:
    """Which extents of the example are equal to one that varies and are said to be fixed, for a program that failed; "" for none."""
    shapes = [tuple(leaf.value.shape) if isinstance(leaf.value, torch.Tensor) else None for leaf in leaves]
    names = {extent: name for name, extent in varying.extents(shapes).items() if extent > 1}
    unnamed = [
        f'dimension {dim} of batch {shown(leaf.where)} is {extent}, as {names[extent]} is: {{{dim}: "{names[extent]}"}} ties them'
        for index, (leaf, shape) in enumerate(zip(leaves, shapes, strict=True))
        for dim, extent in enumerate(shape or ())
        if extent in names and dim not in varying.of_leaf(index)
    ]
    return f"what `dynamic` does not name is fixed; in the example {'; '.join(unnamed)}" if unnamed else ""


def check_uncut(varying: Varying, accumulate: int | str) -> None:
    """Refuse dimensions that would be cut into micro-batches, whose sizes nobody could say for all of a range."""
    cut = next((axis for axis in varying.axes if axis.dim == 0), None)
    if isinstance(accumulate, int) and accumulate > 1 and cut is not None:
        raise ShapeError(
            f"dynamic: {cut.name} is the dimension of batch {cut.where} that accumulate={accumulate} cuts into equal parts: leave it out, "
            'or give micro-batches of their own (Training(accumulate="batches"))'
        )


@dataclass(frozen=True)
class _GivenRange:
    axis: VaryingExtent
    dimension: Dimension | None  # None where the range is given elsewhere


def _axes(name: Any, extents: Any, leaves: Sequence[Leaf]) -> list[_GivenRange]:
    index = _leaf_called(name, leaves)
    where, tensor = shown(leaves[index].where), leaves[index].value
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"dynamic: batch {where} is a {type(tensor).__name__}, which has no dimensions: expected a tensor")
    if not isinstance(extents, Mapping):
        raise TypeError(f"dynamic: expected {{dimension: range}} for {name!r}, got {extents!r}")
    return [_axis(index, where, tensor, dim, extent) for dim, extent in extents.items()]


def _axis(index: int, where: str, tensor: torch.Tensor, dim: Any, extent: Any) -> _GivenRange:
    if isinstance(dim, bool) or not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        shape = tuple(tensor.shape)
        raise ShapeError(f"dynamic: expected a dimension of batch {where}, which has {tensor.dim()} (shape {shape}), got {dim!r}")
    dim %= tensor.dim()
    if isinstance(extent, str):
        return _GivenRange(VaryingExtent(index, dim, extent, where), None)
    given = list(extent) if isinstance(extent, (tuple, list)) else _refuse(where, dim, extent)
    name = given.pop(0) if given and isinstance(given[0], str) else name_of(where, dim)
    if not 2 <= len(given) <= 3 or any(isinstance(each, bool) or not isinstance(each, int) for each in given):
        _refuse(where, dim, extent)
    return _GivenRange(VaryingExtent(index, dim, name, where), Dimension.of_extents(name, *given))


def _refuse(where: str, dim: int, extent: Any) -> NoReturn:
    raise TypeError(f"dynamic: {_WISH} for dimension {dim} of batch {where}; got {extent!r}")


def _leaf_called(name: Any, leaves: Sequence[Leaf]) -> int:
    """Which leaf an argument is. Raises ShapeError that names those that there are."""
    there = [shown(leaf.where) for leaf in leaves]
    for wanted in (f"[{name!r}]", str(name)):
        if wanted in there:
            return there.index(wanted)
    known = ", ".join(each for each, leaf in zip(there, leaves, strict=True) if isinstance(leaf.value, torch.Tensor)) or "none"
    raise ShapeError(f"dynamic: expected an argument of the batch (its tensors are {known}), got {name!r}")


def shown(where: str) -> str:
    return where[3:]


def name_of(where: str, dim: int) -> str:
    """A name for a dimension that has none: input_ids_1, argument_0_1."""
    stem = re.sub(r"\W+", "_", where).strip("_")
    return f"{stem if stem[:1].isalpha() else f'argument_{stem}'}_{dim}"


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
