"""Element-wise operators of large tensors, tried on smaller ones.

    takes   a call
    leaves  what trials of the same call on fewer elements say of it

Such an operator does the same to each element. Where it makes dense results of few elements and takes no memory beside them, it takes none
for many. To try the update of GPT-2's largest parameter on as much data as it has took a fifth of its first step on a new machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

from lowtide.cost.operators import operator
from lowtide.errors import FormatError
from lowtide.ir.graph import Node, Value, arguments
from lowtide.ir.sizes import ITEM_BYTES, contiguous_stride

_MOST = 2**16  # elements of a trial: from half of that on kernels share work among threads
_LIKE = frozenset(f"aten.{name}.default" for name in ("clone", "full_like", "ones_like", "zeros_like"))


def told_by_few(node: Node, run: Callable[[Node], dict[str, Any]]) -> dict[str, Any] | None:
    """What a trial of a call gives but for its time, as trials on fewer elements say; None where they do not, or it has few."""
    if (few := _smaller(node, _MOST)) is None or (whole := _of_all(run(few), few, node)) is None:
        return None
    reply, beside_bytes = whole
    if beside_bytes:  # a number that is given another dtype, say
        fewer = _smaller(node, _MOST // 4)
        again = None if fewer is None else _of_all(run(fewer), fewer, node)
        if again is None or again[1] != beside_bytes:
            return None
    return reply


def _smaller(node: Node, most: int) -> Node | None:
    """The same call of fewer elements; None where it has few, or more than elements may count."""
    tensors = [value for value in node.inputs if value.dtype != "scalar" and value.shape != ()]
    if not tensors or not _is_element_wise(node.op):
        return None
    shape = [extent for extent in tensors[0].shape if isinstance(extent, int)]
    if len(shape) < len(tensors[0].shape) or prod(shape) <= most:
        return None
    if any(value.shape != tuple(shape) or value.stride != contiguous_stride(shape) or value.storage.device != "cpu" for value in tensors):
        return None
    few = _few(shape, most)

    def new(value: Value) -> Value:
        return replace(value, shape=few, stride=contiguous_stride(few)) if value.shape == tuple(shape) else value

    return replace(node, **arguments(node, new))


def _of_all(reply: dict[str, Any], few: Node, node: Node) -> tuple[dict[str, Any], int] | None:
    """What a trial of the whole call gives where one of few elements gave `reply`, and the bytes that it takes beside its results."""
    if "failure" in reply or None in reply["results"]:
        return None
    small, large = (next(value.shape for value in each.inputs if value.shape) for each in (few, node))
    results: list[list[Any]] = []
    for dtype, shape, stride, offset, nbytes, device in reply["results"]:
        if (tuple(shape), tuple(stride), offset, nbytes) != (small, contiguous_stride(small), 0, prod(small) * ITEM_BYTES[dtype]):
            return None
        results.append([dtype, list(large), list(contiguous_stride(large)), 0, prod(large) * ITEM_BYTES[dtype], device])
    small_bytes, large_bytes = (sum(each[4] for each in those) for those in (reply["results"], results))
    writes = any(argument.alias_info is not None for argument in operator(node.op)._schema.arguments)
    beside_bytes = reply["level_bytes"] - (0 if writes else small_bytes)
    if not results or beside_bytes < 0:
        return None
    return {"level_bytes": beside_bytes + (0 if writes else large_bytes), "results": results}, beside_bytes


@cache
def _is_element_wise(op: str) -> bool:
    if not op.startswith("aten."):
        return False
    try:
        tags = {tag.name for tag in operator(op).tags}
    except FormatError:
        return False
    return op in _LIKE or ("pointwise" in tags and "nondeterministic_seeded" not in tags)


def _few(shape: Sequence[int], most: int) -> tuple[int, ...]:
    few = list(shape)
    while prod(few) > most:
        longest = few.index(max(few))
        few[longest] = max(2, few[longest] * most // prod(few), few[longest] // 16)
    return tuple(few)
