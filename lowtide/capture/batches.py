"""Batches as a capture takes them: what they may hold, that the program leaves them as they are, how they are cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lowtide.errors import BatchError, CaptureError
from lowtide.ir import tree

BATCHES = "batches"  # in place of a number of micro-batches: they are given, not cut


def positional_and_keyword(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a batch is passed on:

    a tuple (a NamedTuple, too) or list as positional arguments, a mapping as keyword arguments, anything else as the one argument.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def objects_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What a batch holds beside tensors: objects that the program gets as they are."""
    return [leaf.value for leaf in tree.flatten((args, kwargs))[0] if not isinstance(leaf.value, torch.Tensor)]


def refuse_batch_leaf(leaf: tree.Leaf) -> None:
    """Raise CaptureError for a tensor whose gradient somebody may wait for. Who asks for a capture has looked that it is a plain one."""
    tensor: torch.Tensor = leaf.value
    if tensor.requires_grad:
        raise CaptureError(f"batch{leaf.where} requires gradients, which a captured step does not return: pass it detached")


def refuse_changed_batch(batch: Any, before: list[tree.Leaf]) -> None:
    """The program has structures of its own for the batch's; what it puts into them, the caller would not see."""
    now = tree.flatten(batch)[0]
    changed = [old for old, new in zip(before, now, strict=False) if old.where != new.where or old.value is not new.value]
    if not changed and len(now) == len(before):
        return
    where = (changed or now[len(before) :] or before[len(now) :])[0].where
    raise CaptureError(
        f"the program changes what the batch holds, at batch{where}, and a captured step would leave the caller's as it is: make a copy in "
        "the program and return that, or do without (a cache: use_cache=False)"
    )


def micro_batches(args: tuple[Any, ...], kwargs: dict[str, Any], count: int | str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The batch cut along the first dimension of its tensors into `count` equal parts; what has no such dimension goes to every part.

    With BATCHES each argument is a micro-batch.
    """
    if isinstance(count, str):
        yield from (positional_and_keyword(each) for each in (*args, *kwargs.values()))
        return
    if count == 1:
        yield args, kwargs
        return
    leaves, rebuild = tree.flatten((args, kwargs))
    pieces = [_cut(leaf, count) for leaf in leaves]
    for index in range(count):
        yield tree.unflatten(rebuild, [piece[index] for piece in pieces])


def _cut(leaf: tree.Leaf, count: int) -> Sequence[Any]:
    if not isinstance(leaf.value, torch.Tensor) or leaf.value.dim() == 0:
        return [leaf.value] * count
    if leaf.value.shape[0] % count:
        raise BatchError(f"batch{leaf.where} has {leaf.value.shape[0]} rows, which {count} micro-batches cannot share equally")
    return leaf.value.chunk(count)
