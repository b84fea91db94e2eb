"""Shapes and bytes of a node's arguments and results as plain numbers. All raise CheckError where a size is symbolic."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable
from math import prod
from typing import TypeAlias

from lowtide.errors import CheckError
from lowtide.ir.graph import Arg, Node, Value, values_of
from lowtide.ir.sizes import ITEM_BYTES, Size

Bounds: TypeAlias = "tuple[int, int]"  # the least and the greatest number


def shape_of(node: Node, position: int) -> tuple[int, ...]:
    """The shape of the argument at a position. Raises CheckError unless that is a tensor."""
    return ints(node, node.args[position] if position < len(node.args) else None)


def made_shape(node: Node) -> tuple[int, ...]:
    """The shape of the first result. Raises CheckError where it does not exist."""
    return ints(node, node.outputs[0])


def ints(node: Node, value: Arg) -> tuple[int, ...]:
    """The shape of a tensor among the arguments of `node`. Raises CheckError for anything else."""
    if not isinstance(value, Value):
        raise CheckError(f"{node.op}: expected a tensor to count its operations by, got {value!r}")
    return tuple(map(_int, value.shape))


def bytes_of(values: Iterable[Value]) -> int:
    """The bytes of values, of each dimension of stride 0 once."""
    return sum(map(_value_bytes, values))


def read_bytes(node: Node, unread: Container[int]) -> int:
    """The bytes of all arguments but those at the positions `unread`, each once."""
    args = tuple(arg for position, arg in enumerate(node.args) if position not in unread)
    return bytes_of(dict.fromkeys(values_of((*args, *(arg for _, arg in node.kwargs)))))


def _value_bytes(value: Value) -> int:
    distinct = [_int(size) for size, stride in zip(value.shape, value.stride, strict=True) if stride != 0 or size == 0]
    return prod(distinct) * ITEM_BYTES[value.dtype]


def _int(size: Size) -> int:
    try:
        return operator.index(size)
    except TypeError as error:
        raise CheckError(f"expected a size, got {size}: give its dimensions values first") from error


def below(given: Arg, dimension: Arg) -> Bounds | None:
    """From 0 up to the extent of an argument along a dimension."""
    if not isinstance(given, Value) or not isinstance(dimension, int) or not given.shape:
        return None
    return up_to(given.shape[dimension])


def up_to(count: Size) -> Bounds | None:
    return (0, count - 1) if isinstance(count, int) and count > 0 else None
