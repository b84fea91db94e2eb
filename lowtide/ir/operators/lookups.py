"""What reads and writes where an index says: elements that are touched once are moved once."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from lowtide.errors import of_kind
from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.axes import SUM, ArgumentPath, Axis, DimsByArgument, axis, given
from lowtide.ir.operators.row import AxesRule, Bounds, Count, Fusion, Operator, below, bytes_of, ints, read_bytes
from lowtide.ir.operators.views import without
from lowtide.ir.sizes import ITEM_BYTES


def embedding(node: Node) -> Iterator[Axis]:
    """table[words, e], index[..] -> [.., e]."""
    rank = len(of_kind(Value, node.args[1]).shape)
    for dim in range(rank):
        yield from axis(node, {1: dim}, {0: dim})
    yield from axis(node, {0: 1}, {0: rank})


def embedding_backward(node: Node) -> Iterator[Axis]:
    """gradient[.., e], index[..], words, padding, by frequency -> [words, e]. Frequencies are of the whole index."""
    rank = len(of_kind(Value, node.args[1]).shape)
    for dim in range(rank) if node.args[4] is False else ():
        yield from axis(node, {0: dim, 1: dim}, {0: SUM})
    yield from axis(node, {0: rank}, {0: 1})


def index(node: Node) -> Iterator[Axis]:
    """x[i, j, ..]: dimensions that are not looked up, and those of the indices, which are broadcast."""
    value, dims = of_kind(Value, node.args[0]), _indexed(node)
    if dims is None:
        return
    looked_up, shared, first = dims
    free = [dim for dim in range(len(value.shape)) if dim not in looked_up]
    for dim in free:
        before = sum(each < dim for each in free)
        yield from axis(node, {0: dim}, {0: before + (shared if before >= first else 0)})
    for dim in range(shared):
        yield from axis(node, _indices_along(node, dim - shared), {0: first + dim})


def index_put(node: Node) -> Iterator[Axis]:
    """x, indices, values: dimensions that are not looked up; all of them where a mask as large as x says where."""
    value, source = of_kind(Value, node.args[0]), of_kind(Value, node.args[2])
    mask, dims = _whole_mask(node, value), _indexed(node)
    if mask is not None and len(source.shape) == 0:
        for dim in range(len(value.shape)):
            yield from axis(node, {0: dim, mask: dim}, {0: dim})
    elif dims is not None:
        looked_up, shared, first = dims
        free = [dim for dim in range(len(value.shape)) if dim not in looked_up]
        for position, dim in enumerate(free):
            to = position + (shared if position >= first else 0) - (len(free) + shared)
            there = len(source.shape) >= -to and source.shape[to] != 1
            also: DimsByArgument = {2: to} if there else {}
            yield from axis(node, {0: dim, **also}, {0: dim})


def _indexed(node: Node) -> tuple[list[int], int, int] | None:
    """The dimensions that are looked up, the rank of the indices together, where they go in the result; None where a mask is among them."""
    indices = of_kind(tuple, node.args[1])
    tensors = [each for each in indices if isinstance(each, Value)]
    if not tensors or any(each.dtype in ("bool", "uint8") for each in tensors):
        return None
    looked_up = [dim for dim, each in enumerate(indices) if each is not None]
    adjacent = looked_up[-1] - looked_up[0] == len(looked_up) - 1
    return looked_up, max(len(each.shape) for each in tensors), looked_up[0] if adjacent else 0


def _indices_along(node: Node, dim: int) -> dict[Any, int]:
    """The indices that have a dimension, counted from the back."""
    indices = of_kind(tuple, node.args[1])
    having = (at for at, each in enumerate(indices) if isinstance(each, Value) and len(each.shape) >= -dim and each.shape[dim] != 1)
    return {(1, at): dim for at in having}


def _whole_mask(node: Node, value: Value) -> ArgumentPath | None:
    indices = of_kind(tuple, node.args[1])
    only = indices[0] if len(indices) == 1 else None
    return (1, 0) if isinstance(only, Value) and only.dtype == "bool" and only.shape == value.shape else None


def along(*others: int, free: bool) -> AxesRule:
    """x, dim, index, ..: dimensions other than `dim` where all extents agree; with `free` also `dim`, of which x is whole.

    `others` are the positions of tensors as large as the index.
    """

    def rule(node: Node) -> Iterator[Axis]:
        value, named, where = of_kind(Value, node.args[0]), of_kind(int, node.args[1]), of_kind(Value, node.args[2])
        if len(where.shape) != len(value.shape):
            return
        for dim in range(len(value.shape)):
            sliced: DimsByArgument = dict.fromkeys((2, *others), dim)
            if dim != named % len(value.shape):
                if value.shape[dim] == where.shape[dim] and all(_extent(node, at, dim) in (None, where.shape[dim]) for at in others):
                    yield from axis(node, {0: dim, **sliced}, {0: dim})
            elif free:
                yield from axis(node, sliced, {0: dim})

    return rule


def _extent(node: Node, position: int, dim: int) -> object:
    value = given(node, (position,))
    return None if value is None else value.shape[dim]


def index_select(node: Node) -> Iterator[Axis]:
    """x, dim, index[..]."""
    yield from _by_vector(node, None)


def index_add(node: Node) -> Iterator[Axis]:
    """x, dim, index[..], source: not along `dim`, where every part would add x, or write all of it."""
    yield from _by_vector(node, 3)


def rows_added(node: Node) -> Iterator[Axis]:
    """table[n, width], numbers[n], index[k], rows[k, width]: a part of the table leaves out what is added to others."""
    yield from axis(node, {0: 0, 1: 0}, {0: 0})
    yield from axis(node, {0: 1, 3: 1}, {0: 1})


def _by_vector(node: Node, source: int | None) -> Iterator[Axis]:
    rank, named = len(of_kind(Value, node.args[0]).shape), of_kind(int, node.args[1])
    for dim in range(rank):
        if dim != named % rank:
            also: DimsByArgument = {} if source is None else {source: dim}
            yield from axis(node, {0: dim, **also}, {0: dim})
        elif source is None:
            yield from axis(node, {2: 0}, {0: dim})


def lookup_bytes(node: Node) -> int:
    """Of the table as many elements are read as the result has."""
    return read_bytes(node, (0,)) + 2 * bytes_of(node.results)


def into_positions(*, adds: bool = False) -> Count:
    """Elements of what the caller owns are written over, or added to, where an index says; the rest of it is not touched."""
    return lambda node: _into_positions(node, 2, 3, adds)


def index_put_bytes(node: Node) -> int:
    """As `into_positions`; whether it adds is an argument."""
    return _into_positions(node, 1, 2, len(node.args) > 3 and bool(node.args[3]))


def _into_positions(node: Node, index: int, source: int, adds: bool) -> int:
    given = node.args[source]
    written = given if isinstance(given, Value) else node.args[index]  # a number goes wherever the index points
    written_bytes = prod(ints(node, written)) * ITEM_BYTES[node.writes[0][0].dtype]
    return read_bytes(node, (0,)) + (1 + adds) * written_bytes


def looked_up(node: Node, value: Value) -> Bounds | None:
    return below(node.args[0], 0) if node.args[1] is value else None


def gathered(node: Node, value: Value) -> Bounds | None:
    return below(node.args[0], node.args[1]) if node.args[2] is value else None


ROWS = (
    Operator(name="aten.embedding", axes=embedding, fusion=Fusion.SIMPLE, moved_bytes=lookup_bytes, refuses=looked_up),
    Operator(name="aten.embedding_dense_backward", axes=embedding_backward),
    Operator(name="aten.index", axes=index, moved_bytes=lookup_bytes),
    Operator(name="aten.index_put", axes=index_put),
    Operator(name="aten.index_put_", moved_bytes=index_put_bytes),
    Operator(name="aten.gather", axes=along(free=True), moved_bytes=lookup_bytes, refuses=gathered),
    Operator(name="aten.scatter.src", axes=along(3, free=False)),
    Operator(name="aten.scatter.value", axes=along(free=False)),
    Operator(name="aten.scatter_", moved_bytes=into_positions()),
    Operator(name="aten.scatter_add", axes=along(3, free=False)),
    Operator(name="aten.scatter_add_", moved_bytes=into_positions(adds=True)),
    Operator(name="aten.index_select", axes=index_select, moved_bytes=lookup_bytes, refuses=gathered),
    Operator(name="aten.index_add", axes=index_add),
    Operator(name="aten.index_add_", moved_bytes=into_positions(adds=True)),
    Operator(name="aten.index_copy", axes=index_add),
    Operator(name="aten.index_copy_", moved_bytes=into_positions()),
    Operator(name="aten.index_fill.int_Scalar", axes=without(1)),
    Operator(name="aten.take", moved_bytes=lookup_bytes),
    Operator(name="aten.masked_select.default", shaped_by=(1,)),
)
