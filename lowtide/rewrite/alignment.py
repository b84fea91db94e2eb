"""Products of matrices whose rows begin where tensor cores cannot read them, on operands with zeros at their ends: for `exact=False` alone.

A GPU's fast kernels want rows that begin at multiples of 16 bytes. The scores of a vocabulary of 50,257 words have none, and neither has
their gradient, so that three of a language model's products run at a sixth of their speed. With zeros to the next multiple of eight:

    scores = mm(x, t(w))             padded = constant_pad_nd(w, 7 rows)        sums = mm(x, t(padded))
                                     scores = clone(slice(sums, 50,257 columns))
    dx = mm(dscores, w)              wide = constant_pad_nd(dscores, 7 columns) dx = mm(wide, padded)
    dw = mm(t(dscores), x)           dw = clone(slice(mm(t(wide), x), 50,257 rows))

Zeros change no sum, but another kernel adds in another order. Products that read the same operand share its padded copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from lowtide.ir.graph import Arg, Atom, Kind, Node, Value
from lowtide.ir.operators.row import CLONE
from lowtide.ir.sizes import ITEM_BYTES, ROW_BYTES, Size
from lowtide.rewrite.base import Match, Uses, is_row_by_row

_ADDMM = "aten.addmm.default"
_PRODUCTS = ("aten.mm.default", "aten.bmm.default", _ADDMM)
_PAD, _SLICE, _TURN = "aten.constant_pad_nd.default", "aten.slice.Tensor", "aten.transpose.int"
_TURNS = ("aten.t.default", _TURN)
_FAST = frozenset({"float16", "bfloat16", "float32"})  # that tensor cores multiply
_CONTIGUOUS = (("memory_format", Atom("memory_format", "contiguous_format")),)

_Key: TypeAlias = tuple[Value, tuple[int, int]]  # what is padded, and by how much
_Known: TypeAlias = dict[_Key, Value]


@dataclass(frozen=True)
class _Operand:
    """What a product reads, as its rows lie in memory, and how many zeros go to the end of its rows' and of their number."""

    rows: Value
    turned: bool  # the product reads its columns
    more: tuple[int, int]  # rows, elements of a row


@dataclass(frozen=True)
class _Product:
    node: Node
    left: _Operand
    right: _Operand
    more: tuple[int, int]  # rows, columns of the result


def is_product(node: Node) -> bool:
    """Whether it is of the operators that this rule knows."""
    return node.op in _PRODUCTS


def products_padded(uses: Uses) -> Iterator[Match]:
    """Every product on a GPU of which one matrix has such rows; those that share an operand are one place."""
    products = [product for op in _PRODUCTS for node in uses.nodes_of(op) if (product := _product(uses, node)) is not None]
    for group in _groups(sorted(products, key=lambda each: uses.place[each.node])):
        known: _Known = {}
        instead = {each.node: tuple(_padded(uses, each, known)) for each in group}
        storage = group[0].node.results[0].storage
        yield Match(instead, storage, now=storage)


def _groups(products: list[_Product]) -> list[list[_Product]]:
    """Products by the padded operands that they share, each group in program order."""
    groups: list[tuple[set[_Key], list[_Product]]] = []
    for product in products:
        keys, members = {(each.rows, each.more) for each in (product.left, product.right) if any(each.more)}, [product]
        for group in [each for each in groups if each[0] & keys]:
            groups.remove(group)
            keys, members = keys | group[0], group[1] + members
        groups.append((keys, members))
    return [sorted(members, key=products.index) for _, members in groups]


def _product(uses: Uses, node: Node) -> _Product | None:
    """The product as it would be padded; None where there is nothing to pad, or the rule does not know how."""
    result, matrices = node.outputs[0], node.args[-2:]
    if node.kwargs or node.writes or result is None or not _has_tensor_cores(result):
        return None
    left, right = matrices
    if not isinstance(left, Value) or not isinstance(right, Value) or not is_row_by_row(result):
        return None
    bias = node.args[0]
    if node.op == _ADDMM and not (isinstance(bias, Value) and bias.shape == result.shape[-1:]):  # one number for each column
        return None
    sizes = defaultdict[str, int](int)
    for value, names in ((left, "mk"), (right, "kn"), (result, "mn")):
        sizes |= {name: more for name, more in zip(names, _missing(value), strict=True) if more}
    if not sizes:
        return None
    rows, inner, columns = sizes["m"], sizes["k"], sizes["n"]
    first, second = _operand(uses, left, rows, inner), _operand(uses, right, inner, columns)
    return None if first is None or second is None else _Product(node, first, second, (rows, columns))


def _has_tensor_cores(value: Value) -> bool:
    """Whether there are some where a value lies, for what it is of."""
    return value.dtype in _FAST and value.storage.device.startswith("cuda")


def _missing(value: Value) -> tuple[int, int]:
    """By how many elements the last two dimensions of a matrix are short of a row that begins where it can be read fast."""
    *_, height, width = zip(value.shape, value.stride, strict=True)
    per_row = ROW_BYTES // ITEM_BYTES[value.dtype]
    return _short(height, width, per_row), _short(width, height, per_row)


def _short(inner: tuple[Size, Size], outer: tuple[Size, Size], per_row: int) -> int:
    """The same of one of them, where its elements lie side by side and the other counts rows."""
    (size, step), (count, stride) = inner, outer
    if step != 1 or count == 1 or not isinstance(size, int) or not isinstance(stride, int) or stride % per_row == 0:
        return 0
    return -size % per_row


def _operand(uses: Uses, value: Value, height: int, width: int) -> _Operand | None:
    """What a product reads, followed to what lies row by row."""
    rows, turned = value, False
    while (maker := uses.makers.get(rows)) is not None and maker.op in _TURNS and _turns_matrix(maker):
        rows, turned = maker.inputs[0], not turned
    more = (width, height) if turned else (height, width)
    return _Operand(rows, turned, more) if not any(more) or is_row_by_row(rows) else None


def _turns_matrix(node: Node) -> bool:
    rank = len(node.results[0].shape)
    return rank == 2 or {int(each) % rank for each in node.args[1:] if isinstance(each, int)} == {rank - 1, rank - 2}


def _padded(uses: Uses, product: _Product, known: _Known) -> Iterator[Node]:
    """The nodes in a product's place. What of its operands is padded by now is `known`."""
    node, matrices = product.node, list[Arg]()
    result = node.results[0]
    for given, operand in zip(node.args[-2:], (product.left, product.right), strict=True):
        matrices.append((yield from _matrix(uses, node, operand, known)) if any(operand.more) else given)
    bias = list(node.args[:-2])
    for row in [each for each in bias if isinstance(each, Value) and product.more[1]]:
        bias = [(yield from _with_zeros(uses, node, row, (product.more[1],)))]
    if not any(product.more):
        yield replace(node, args=(*bias, *matrices))
        return
    *batch, height, width = result.shape
    shape = (*batch, height + product.more[0], width + product.more[1])
    sums = uses.fresh(result, f"{result.name}_padded", result.dtype, shape)
    yield replace(node, args=(*bias, *matrices), outputs=(sums,), inplace=())
    for axis, size in enumerate((height, width), start=len(batch)):
        if sums.shape[axis] != size:
            part = replace(sums, name=uses.name(f"{result.name}_part"), shape=(*sums.shape[:axis], size, *sums.shape[axis + 1 :]))
            yield Node(_SLICE, (sums, axis, 0, size), (part,), source=node.source)
            sums = part
    yield Node(CLONE, (sums,), (result,), kwargs=_CONTIGUOUS, source=node.source)


def _matrix(uses: Uses, node: Node, operand: _Operand, known: _Known) -> Generator[Node, None, Value]:
    key = operand.rows, operand.more
    if key not in known:
        known[key] = yield from _with_zeros(uses, node, *key)
    matrix = known[key]
    if not operand.turned:
        return matrix
    turned = replace(matrix, name=uses.name(f"{matrix.name}_t"), shape=_turned(matrix.shape), stride=_turned(matrix.stride))
    yield Node(_TURN, (matrix, -2, -1), (turned,), source=node.source)
    return turned


def _turned(sizes: tuple[Size, ...]) -> tuple[Size, ...]:
    return (*sizes[:-2], sizes[-1], sizes[-2])


def _with_zeros(uses: Uses, node: Node, value: Value, more: tuple[int, ...]) -> Generator[Node, None, Value]:
    """A value with so many zeros at the end of each of its last dimensions."""
    kept, ends = value.shape[: -len(more)], value.shape[-len(more) :]
    shape = (*kept, *(size + each for size, each in zip(ends, more, strict=True)))
    padded = uses.fresh(value, f"{value.name}_padded", value.dtype, shape)
    kind = Kind.ACTIVATION if padded.storage.kind.caller_owned else padded.storage.kind
    padded = replace(padded, storage=replace(padded.storage, kind=kind))
    pads = tuple(number for each in reversed(more) for number in (0, each))
    yield Node(_PAD, (value, pads, 0), (padded,), source=node.source)
    return padded
