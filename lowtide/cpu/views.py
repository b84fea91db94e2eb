"""Operators that only see a tensor in another way, as arithmetic on where it lies."""

from __future__ import annotations

from collections.abc import Callable

from lowtide.base.narrow import of_kind
from lowtide.cpu.layout import Lay
from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.table import functional_base

Seen = list[Lay] | None  # a place for each result; None where it does not lie so


def seen(node: Node, lay: Lay) -> Seen:
    """Where a view's results lie, given where its argument does."""
    return VIEWS[functional_base(node.op).removeprefix("aten.")](node, lay)


def _ints(arg: object) -> list[int]:
    return [int(each) for each in arg if isinstance(each, int)] if isinstance(arg, tuple) else []


def _number(node: Node, position: int, default: int) -> int:
    arg = node.args[position] if len(node.args) > position else None
    return default if arg is None else int(arg)  # type: ignore[arg-type]


def _shape(node: Node) -> tuple[int, ...]:
    made = node.outputs[0]
    made = of_kind(Value, made)
    return tuple(int(size) for size in made.shape)


def _view(node: Node, lay: Lay) -> Seen:
    found = lay.viewed(_shape(node))
    return None if found is None else [found]


def _permute(node: Node, lay: Lay) -> Seen:
    return [lay.permuted([dim % len(lay.shape) for dim in _ints(node.args[1])])]


def _transpose(node: Node, lay: Lay) -> Seen:
    dims = list(range(len(lay.shape)))
    one, two = _number(node, 1, 0) % len(dims), _number(node, 2, 1) % len(dims)
    dims[one], dims[two] = dims[two], dims[one]
    return [lay.permuted(dims)]


def _t(node: Node, lay: Lay) -> Seen:
    return [lay.permuted(range(len(lay.shape))[::-1])]


def _same(node: Node, lay: Lay) -> Seen:
    return [lay]


def _unsqueeze(node: Node, lay: Lay) -> Seen:
    return [lay.with_one(_number(node, 1, 0) % (len(lay.shape) + 1))]


def _expand(node: Node, lay: Lay) -> Seen:
    found = lay.broadcast(_shape(node))
    return None if found is None else [found]


def _slice(node: Node, lay: Lay) -> Seen:
    dim = _number(node, 1, 0) % len(lay.shape)
    start, step = _number(node, 2, 0), _number(node, 4, 1)
    size = lay.shape[dim]
    start = max(0, start + size if start < 0 else start)
    return [lay.narrowed(dim, min(start, size), _shape(node)[dim], step)]


def _select(node: Node, lay: Lay) -> Seen:
    dim, at = _number(node, 1, 0) % len(lay.shape), _number(node, 2, 0)
    return [lay.without(dim, at % lay.shape[dim])]


def _parts(node: Node, lay: Lay) -> Seen:
    """Of split: the sizes as they lie one behind the other."""
    dim, said = _number(node, 2, 0) % len(lay.shape), node.args[1]
    size = lay.shape[dim]
    sizes = _ints(said) if isinstance(said, tuple) else [min(int(said), size - at) for at in range(0, size, int(said))]  # type: ignore[arg-type]
    found, at = [], 0
    for each in sizes:
        found.append(lay.narrowed(dim, at, each))
        at += each
    return found


def _unbind(node: Node, lay: Lay) -> Seen:
    dim = _number(node, 1, 0) % len(lay.shape)
    return [lay.without(dim, at) for at in range(lay.shape[dim])]


def _squeeze(node: Node, lay: Lay) -> Seen:
    return _view(node, lay)


def _strided(node: Node, lay: Lay) -> Seen:
    """Only of what already lies so."""
    return [lay]


VIEWS: dict[str, Callable[[Node, Lay], Seen]] = {
    "view": _view, "_unsafe_view": _view, "reshape": _view, "_reshape_alias": _view, "permute": _permute, "transpose": _transpose, "t": _t,
    "alias": _same, "detach": _same, "unsqueeze": _unsqueeze, "squeeze": _squeeze, "expand": _expand, "slice": _slice, "select": _select,
    "split": _parts, "unsafe_split": _parts, "split_with_sizes": _parts, "unbind": _unbind, "as_strided": _strided,
}  # fmt: skip
