"""What only changes how memory is seen, and copies that do the same: reshapes, permutations, selections, joins.

A reshape keeps the order of elements. Its dimensions fall into groups of equal products, [2, 256, 12, 64] -> [512, 768] into (2, 256 | 512)
and (12, 64 | 768); of each group the outermost dimensions have an axis, whose parts are contiguous runs of the group on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lowtide.errors import of_kind
from lowtide.ir.graph import Arg, Node, Value
from lowtide.ir.operators.axes import ArgumentPath, Axis, axis, divides, number
from lowtide.ir.operators.row import AxesRule, Fake, Fusion, Operator
from lowtide.ir.sizes import Size

_TO_END = 2**63 - 1  # the end of a slice that ends where its argument does


def reshape(node: Node) -> Iterator[Axis]:
    """The outermost dimension of each group, see above."""
    value, result = of_kind(Value, node.args[0]), node.results[0]
    for dim, to in outermost(value.shape, result.shape) if value.dtype == result.dtype else ():
        yield from axis(node, {0: dim}, {0: to}, _extents(node, 1, to))


def outermost(before: Sequence[Size], after: Sequence[Size]) -> list[tuple[int, int]]:
    """Pairs of dimensions that begin groups of equal products, extents of 1 aside; those up to where it cannot be told."""
    return [(mine[0], theirs[0]) for mine, theirs in groups(before, after)]


def groups(before: Sequence[Size], after: Sequence[Size]) -> list[tuple[list[int], list[int]]]:
    """Dimensions of equal products, extents of 1 aside, the outermost first; those up to where it cannot be told."""
    left = [dim for dim, extent in enumerate(before) if extent != 1]
    right = [dim for dim, extent in enumerate(after) if extent != 1]
    pairs: list[tuple[list[int], list[int]]] = []
    while left and right and 0 not in before:
        one, two = [left.pop(0)], [right.pop(0)]
        mine, theirs = before[one[0]], after[two[0]]
        while mine != theirs:
            if left and _grows_to(mine, theirs):
                one.append(left.pop(0))
                mine = mine * before[one[-1]]
            elif right and _grows_to(theirs, mine):
                two.append(right.pop(0))
                theirs = theirs * after[two[-1]]
            else:
                return pairs
        pairs.append((one, two))
    return pairs


def _grows_to(one: Size, two: Size) -> bool:
    """Whether a product has to be multiplied on to become the other, for all that can be told."""
    return one < two if isinstance(one, int) and isinstance(two, int) else divides(one, two)


def _extents(node: Node, position: int, *dims: int) -> tuple[ArgumentPath, ...]:
    sizes = node.args[position] if position < len(node.args) else None
    return tuple((position, dim) for dim in dims) if isinstance(sizes, tuple) else ()


def permute(node: Node) -> Iterator[Axis]:
    for to, dim in enumerate(of_kind(tuple, node.args[1])):
        yield from axis(node, {0: _int(dim)}, {0: to})


def transpose(node: Node) -> Iterator[Axis]:
    """Two dimensions change places; `t` has at most two."""
    rank = len(of_kind(Value, node.args[0]).shape)
    order = list(range(rank))
    pair = [dim % rank for dim in (node.args[1:3] or (0, 1)) if isinstance(dim, int)] if rank > 1 else []
    if pair:
        order[pair[0]], order[pair[1]] = order[pair[1]], order[pair[0]]
    for to, dim in enumerate(order):
        yield from axis(node, {0: dim}, {0: to})


def expand(node: Node) -> Iterator[Axis]:
    """What is there maps; what is new, or was 1, is made of the whole argument in every part."""
    value, result = of_kind(Value, node.args[0]), node.results[0]
    new = len(result.shape) - len(value.shape)
    for to in range(len(result.shape)):
        there = to >= new and value.shape[to - new] != 1
        yield from axis(node, {0: to - new} if there else {}, {0: to}, _extents(node, 1, to))


def without(position: int, names: str = "dim", default: Arg = 0) -> AxesRule:
    """All dimensions but those that an argument names, which the results lack where there are fewer of them: select, unbind, flip."""

    def rule(node: Node) -> Iterator[Axis]:
        rank, named = len(of_kind(Value, node.args[0]).shape), number(node, position, names, default)
        listed = named if isinstance(named, tuple) else (named,)
        closed = [_int(dim) % max(1, rank) for dim in listed]
        fewer = len(node.results[0].shape) < rank
        for dim in range(rank) if listed else ():  # none are named where all are meant, flattened
            if dim not in closed:
                to = dim - sum(each < dim for each in closed) if fewer else dim
                yield from axis(node, {0: dim}, dict.fromkeys(range(len(node.outputs)), to))

    return rule


def squeeze(node: Node) -> Iterator[Axis]:
    """Dimensions that are not named: one that is could be of 1 in a part, and go."""
    named, rank = node.args[1], len(of_kind(Value, node.args[0]).shape)
    listed = named if isinstance(named, tuple) else (named,)
    yield from in_order(node, [_int(dim) % max(1, rank) for dim in listed])


def in_order(node: Node, closed: Sequence[int] = ()) -> Iterator[Axis]:
    """Dimensions but those of 1 are the same on both sides."""
    value, result = of_kind(Value, node.args[0]), node.results[0]
    left = [dim for dim, extent in enumerate(value.shape) if extent != 1]
    right = [dim for dim, extent in enumerate(result.shape) if extent != 1]
    for dim, to in zip(left, right, strict=True):
        if dim not in closed:
            yield from axis(node, {0: dim}, {0: to})


def leading(node: Node) -> Iterator[Axis]:
    """Dimensions that both sides have: the last of one of them is that of a complex number's parts."""
    for dim in range(min(len(of_kind(Value, node.args[0]).shape), len(node.results[0].shape))):
        yield from axis(node, {0: dim}, {0: dim})


def slice_(node: Node) -> Iterator[Axis]:
    """All dimensions but the one that is cut; that one, too, where nothing is cut off."""
    value, result = of_kind(Value, node.args[0]), node.results[0]
    rank = len(value.shape)
    cut = _int(number(node, 1, "dim", 0)) % rank
    whole = value.shape[cut] == result.shape[cut] and number(node, 4, "step", 1) == 1
    for dim in range(rank):
        if dim != cut:
            yield from axis(node, {0: dim}, {0: dim})
        elif whole:
            yield from axis(node, {0: dim}, {0: dim}, instead={(3,): _TO_END} if len(node.args) > 3 else {})


def cat(node: Node) -> Iterator[Axis]:
    """All dimensions but the one along which arguments are joined; empty vectors among them are skipped, as torch does."""
    rank = len(node.results[0].shape)
    joined = _int(number(node, 1, "dim", 0)) % max(1, rank)
    for dim in range(rank):
        if dim != joined:
            yield from axis(node, {(0, at): dim for at in _joined(node, rank)}, {0: dim})


def _joined(node: Node, rank: int) -> list[int]:
    tensors = of_kind(tuple, node.args[0])
    return [at for at, value in enumerate(tensors) if isinstance(value, Value) and len(value.shape) == rank]


def stack(node: Node) -> Iterator[Axis]:
    """As cat along a new dimension."""
    rank = len(node.results[0].shape)
    joined = _int(number(node, 1, "dim", 0)) % rank
    for dim in range(rank - 1):
        yield from axis(node, {(0, at): dim for at in _joined(node, rank - 1)}, {0: dim + (dim >= joined)})


def repeat(node: Node) -> Iterator[Axis]:
    """Dimensions that are repeated once."""
    times = of_kind(tuple, node.args[1])
    new = len(times) - len(of_kind(Value, node.args[0]).shape)
    for to, count in enumerate(times):
        if to >= new and count == 1:
            yield from axis(node, {0: to - new}, {0: to})


def back_from(fewer: bool) -> AxesRule:
    """The gradient of a view of a part of one dimension, given the whole's sizes: slice_backward, select_backward."""

    def rule(node: Node) -> Iterator[Axis]:
        rank = len(node.results[0].shape)
        cut = _int(node.args[2]) % rank
        for dim in range(rank):
            if dim != cut:
                yield from axis(node, {0: dim - (fewer and dim > cut)}, {0: dim}, _extents(node, 1, dim))

    return rule


def pad(node: Node) -> Iterator[Axis]:
    """Dimensions that are not padded."""
    amounts, rank = of_kind(tuple, node.args[1]), len(node.results[0].shape)
    for dim in range(rank):
        at = 2 * (rank - 1 - dim)
        if all(amount == 0 for amount in amounts[at : at + 2]):
            yield from axis(node, {0: dim}, {0: dim})


def _int(arg: Arg) -> int:
    return of_kind(int, arg)


_GENERATED: dict[str, Any] = {"fusion": Fusion.SIMPLE, "fusible": True}


def _row(name: str, rule: AxesRule, **columns: Any) -> Operator:
    return Operator(name=f"aten.{name}", axes=rule, any_strides=True, **columns)


_SEEN = tuple(
    Operator(name=f"aten.{name}", view=True)
    for name in (
        "_conj", "_fw_primal", "_indices", "_make_dual", "_neg_view", "_nested_get_values", "_nested_view_from_buffer",
        "_nested_view_from_jagged", "_reshape_alias", "_sparse_broadcast_to", "_values", "as_strided", "ccol_indices", "col_indices",
        "crow_indices", "diagonal", "indices", "row_indices", "slice_inverse", "values",
    )
)  # fmt: skip

_VIEWS = (
    _row("view", reshape, view=True, fake=Fake.STRIDES_OF_VIEWS, **_GENERATED),
    _row("view_as_real", leading, view=True),
    _row("view_as_complex", leading, view=True),
    _row("permute", permute, view=True, **_GENERATED),
    _row("transpose", transpose, view=True, **_GENERATED),
    _row("t", transpose, view=True, **_GENERATED),
    _row("expand", expand, view=True, **_GENERATED),
    _row("unsqueeze", in_order, view=True, **_GENERATED),
    Operator(name="aten.squeeze", view=True, **_GENERATED),
    _row("squeeze.dim", squeeze),
    _row("squeeze.dims", squeeze),
    _row("select", without(1), view=True, **_GENERATED),
    _row("unbind", without(1), view=True, **_GENERATED),
    _row("slice", slice_, view=True, **_GENERATED),
    _row("split", without(2), view=True, **_GENERATED),
    _row("split_with_sizes", without(2), view=True, **_GENERATED),
    _row("unfold", without(1), view=True),
)

_COPIES = (
    _row("_unsafe_view", reshape, fake=Fake.STRIDES_OF_VIEWS, **_GENERATED),
    _row("reshape", reshape, **_GENERATED),
    _row("permute_copy", permute),
    _row("unsafe_split", without(2)),
    Operator(name="aten.chunk", **_GENERATED),
    _row("flip", without(1, "dims", ())),
    _row("_fft_c2c", without(1, "dim", ())),
    _row("roll", without(2, "dims", ()), fusion=Fusion.SIMPLE),
    _row("cat", cat, **_GENERATED),
    _row("stack", stack, **_GENERATED),
    _row("repeat", repeat),
    _row("slice_backward", back_from(fewer=False)),
    _row("select_backward", back_from(fewer=True)),
    _row("constant_pad_nd", pad, **_GENERATED),
    Operator(name="aten.constant_pad_nd.default", fake=Fake.FIXES_SIZES),
    Operator(name="aten._pack_padded_sequence.default", shaped_by=(1,)),
    Operator(name="aten._nested_tensor_from_mask_left_aligned.default", answers_without_data=True),
    *(Operator(name=f"aten.{name}", rebinds=True) for name in ("set_", "resize_", "resize_as_", "_resize_output_")),
)

ROWS = (*_SEEN, *_VIEWS, *_COPIES)
