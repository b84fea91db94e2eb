"""A node with a body as a Python loop: results are made, then each part runs on its share of what is given.

    total = aten.zeros.default([768], dtype=torch.float32, device=device('cpu'))
    rows = aten.empty_strided.default([512, 768], [768, 1], dtype=torch.float32, device=device('cpu'))
    for start in range(0, 512, 64):  # 8 parts
        part = min(64, 512 - start)
        x_part = x.narrow(0, start, part)
        rows_part = rows.narrow(0, start, part)
        ...

What a part makes is let go within its turn; what works in the memory of an input that dies does so in every part alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module

import sympy
import torch

from lowtide.ir.bodies import NEUTRAL, Into, Loop, is_loop
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.shapes.dimension import Dimension
from lowtide.ir.shapes.points import at, python_text, sizes_of_arg
from lowtide.ir.sizes import Size, contiguous_stride
from lowtide.lower.statements import Offloaded, VariableNames, deaths, releases, statements

_NOTHING = Offloaded(frozenset(), {}, frozenset())
_INDENT = "    "


def lines(node: Node, reuse: int, names: VariableNames, fresh: Callable[[str], str], wide: dict[str, int] | None = None) -> Iterator[str]:
    """The lines of a loop whose arguments and results have names; `wide` are the dimensions around it, each at its largest."""
    loop, wide = Loop.of(node), wide or {}
    for which, (result, _, into) in enumerate(loop.results):
        if which == 0 and reuse >= 0:
            yield f"{names[result]} = {names[node.inplace[reuse][0]]}  # each part goes where what it is made of lay"
        else:
            yield from _made(result, into, names)
    extent = _size_text(loop.extent, names)
    start, part = fresh("start"), fresh(loop.body.dimensions[0].name)
    inner: VariableNames = {**names, loop.body.dimensions[0].symbol: part}
    yield f"for {start} in range(0, {extent}, {loop.part}):{_count(loop)}"
    yield f"{_INDENT}{part} = min({loop.part}, {extent} - {start})"
    for line in _within(loop, inner, (start, part), fresh, wide | {loop.body.dimensions[0].name: loop.part}):
        yield f"{_INDENT}{line}"


def _within(loop: Loop, names: VariableNames, turn: tuple[str, str], fresh: Callable[[str], str], wide: dict[str, int]) -> Iterator[str]:
    body, views = loop.body, []
    for outer, inner, dim in (
        *loop.cut,
        *((value, position, into if isinstance(into, int) else None) for value, position, into in loop.results),
    ):
        names[inner] = names[outer]
        if dim is not None:
            names[inner] = fresh(f"{outer.name}_{turn[1]}")
            views.append(names[inner])
            yield f"{names[inner]} = {names[outer]}.narrow({dim}, {_share(outer, dim, loop, turn)})"
    for node in body.nodes:
        for value in node.outputs:
            if value is not None:
                names[value] = fresh(value.name)
        for before, after in node.writes:
            names[after] = names[before]
    yield from _sizes(body, names, fresh)
    yield from _steps(body, names, fresh, wide)
    given = {value.storage for value in body.inputs}  # views of these hold what they look at
    views += [names[value] for node in body.nodes for value in node.outputs if value is not None and value.storage in given]
    if views:
        yield f"del {', '.join(views)}"


def _steps(body: Graph, names: VariableNames, fresh: Callable[[str], str], wide: dict[str, int]) -> Iterator[str]:
    footprint = import_module("lowtide.cost.bodies").body_footprint  # whose kernels take more memory than most programs without loops
    reuses = footprint(_at(body, wide)).reuses.tolist()
    dying = deaths(body, range(len(body.nodes)))
    for node, reuse, dead in zip(body.nodes, reuses, dying, strict=True):
        yield from lines(node, reuse, names, fresh, wide) if is_loop(node) else statements(node, reuse, names, _NOTHING)
        yield from releases(dead, names, node, reuse)


def _sizes(body: Graph, names: VariableNames, fresh: Callable[[str], str]) -> Iterator[str]:
    """The sizes that stand among a body's arguments, each once."""
    arguments = (arg for node in body.nodes if not is_loop(node) for arg in (*node.args, *(arg for _, arg in node.kwargs)))
    for size in dict.fromkeys(size for arg in arguments for size in sizes_of_arg(arg)):
        if isinstance(size, sympy.Symbol):
            continue
        text = _size_text(size, names)
        names[size] = fresh("size")
        yield f"{names[size]} = {text}"


def _share(value: Value, dim: int, loop: Loop, turn: tuple[str, str]) -> str:
    """Where a part begins along a dimension, and how long it is there."""
    times = int(sympy.cancel(sympy.sympify(value.shape[dim]) / sympy.sympify(loop.extent)))
    start, part = turn
    return f"{start}, {part}" if times == 1 else f"{times} * {start}, {times} * {part}"


def _made(value: Value, into: Into, names: VariableNames) -> Iterator[str]:
    """The lines that make a result as no part has touched it."""
    shape, stride = (f"[{', '.join(_size_text(size, names) for size in sizes)}]" for sizes in (value.shape, value.stride))
    where = f"dtype=torch.{value.dtype}, device=device({value.storage.device!r})"
    if into in ("sum", "any") and value.stride == contiguous_stride(value.shape):
        yield f"{names[value]} = aten.zeros.default({shape}, {where})"
        return
    yield f"{names[value]} = aten.empty_strided.default({shape}, {stride}, {where})"
    if not isinstance(into, int):
        yield f"aten.fill_.Scalar({names[value]}, {_neutral(into, value.dtype)})"


def _neutral(into: str, dtype: str) -> str:
    number, kind = NEUTRAL[into], getattr(torch, dtype)
    if into in ("max", "min") and not kind.is_floating_point:
        limits = torch.iinfo(kind) if kind != torch.bool else None
        return repr(into == "min") if limits is None else repr(limits.min if into == "max" else limits.max)
    return repr(number)


def _count(loop: Loop) -> str:
    if not isinstance(loop.extent, int):
        return ""
    count, rest = -(-loop.extent // loop.part), loop.extent % loop.part
    return f"  # {count} parts" + (f", the last of {rest}" if rest else "")


def _size_text(size: Size, names: VariableNames) -> str:
    """A size by the variables of its dimensions; they are within the grammar of sizes that have no quotients."""
    if isinstance(size, int):
        return str(size)
    if size in names:
        return names[size]
    return python_text(size, {str(symbol): names[symbol] for symbol in size.free_symbols})


def _at(body: Graph, wide: dict[str, int]) -> Graph:
    """A body at its largest, the dimensions around it included."""
    return at(replace(body, dimensions=tuple(Dimension(name, 1, most) for name, most in wide.items())), wide)
