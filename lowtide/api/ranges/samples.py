"""The example as a batch of other extents: its own data, repeated or cut, so that what is read from them is what batches hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lowtide.capture.sizes.strides import memory_order
from lowtide.errors import ShapeError
from lowtide.ir import tree
from lowtide.ir.extents import Varying


def largest(args: tuple[Any, ...], kwargs: dict[str, Any], varying: Varying) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch with the largest extents of the range."""
    return stretched(args, kwargs, varying, {each.extent_name: each.extent(each.most) for each in varying.dimensions})


def stretched(
    args: tuple[Any, ...], kwargs: dict[str, Any], varying: Varying, wanted: Mapping[str, int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch with these extents, by name; tensors that have that shape already are passed on.

    Raises ShapeError where there is no memory for it.
    """
    leaves, rebuild = tree.flatten((args, kwargs))
    extents = [{dim: wanted[name] for dim, name in varying.of_leaf(index).items()} for index in range(len(leaves))]
    try:
        found = [_stretched(leaf.value, own) for leaf, own in zip(leaves, extents, strict=True)]
    except RuntimeError as error:  # torch's own for memory that there is not, and for more elements than it can count
        where = ", ".join(f"{name} = {extent}" for name, extent in wanted.items())
        raise ShapeError(f"dynamic: a batch of {where} cannot be made on this machine ({error}): let the ranges end lower") from error
    made: tuple[tuple[Any, ...], dict[str, Any]] = tree.unflatten(rebuild, found)
    return made


def _stretched(item: Any, extents: Mapping[int, int]) -> Any:
    if not extents or all(item.shape[dim] == extent for dim, extent in extents.items()):
        return item
    shape = [extents.get(dim, extent) for dim, extent in enumerate(item.shape)]
    order = memory_order(item)[::-1]
    made = item.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(item.dim())])
    for dim, extent in extents.items():
        places = torch.arange(extent, device=item.device) % max(item.shape[dim], 1)
        item = item.index_select(dim, places)
    return made.copy_(item)
