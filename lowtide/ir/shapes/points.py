"""Sizes and graphs over dimensions at one point, in whole numbers of any length.

takes   a graph, and a number for each of its dimensions
leaves  a graph of as many nodes in the same order, in which every size is an int: shapes, strides, offsets, bytes, arguments, bodies; but
        those that follow from dimensions that a body has of its own

All sizes of a graph are compiled Python, microseconds at a point. A size becomes a numerator and a denominator, each a text over the
numbers of the dimensions; the denominator must divide the numerator. The text is made from the expression's own parts, its dimensions
renamed: nothing that was read from a file is executed. What stands within Max, Min and Mod must be whole by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeAlias

import sympy

from lowtide.errors import FormatError, ShapeError
from lowtide.ir.graph import Arg, Graph, Node, Storage, Value
from lowtide.ir.shapes.dimension import Dimensions, checked_dimensions, checked_point
from lowtide.ir.sizes import Size
from lowtide.ir.text.sizes import canonical

CompiledSizes: TypeAlias = "Callable[..., tuple[int, ...]]"  # of the dimensions' numbers in their order


def size_at(size: Size, dimensions: Dimensions, point: Mapping[str, int]) -> int:
    """A size at a point. Raises ShapeError for a wrong point, an unknown dimension, or a size that is no whole number there."""
    (number,) = sizes_at((size,), dimensions, point)
    return number


def sizes_at(sizes: Sequence[Size], dimensions: Dimensions, point: Mapping[str, int]) -> tuple[int, ...]:
    """Sizes at a point, in their order. Raises ShapeError as `size_at` does."""
    return compiled(tuple(sizes), dimensions)(*checked_point(dimensions, point).values())


@lru_cache(maxsize=256)
def compiled(sizes: tuple[Size, ...], dimensions: Dimensions) -> CompiledSizes:
    """A function of the numbers of `dimensions`, positional, that gives all sizes; it does not check ranges.

    Raises ShapeError for an unknown dimension, FormatError for what is no size. The function raises ShapeError for what is not whole.
    """
    names = {each.name: f"d{position}" for position, each in enumerate(dimensions)}
    entries = [python_text(size, names) for size in sizes]
    function: CompiledSizes = function_of(tuple(names.values()), f"({''.join(f'{entry}, ' for entry in entries)})")
    return function


def function_of(variables: Sequence[str], text: str) -> Callable[..., Any]:
    """A function of these variables, positional, that gives what `python_text` has written."""
    source = f"lambda {', '.join(variables)}: {text}"
    function: Callable[..., Any] = eval(source, {"__builtins__": {}, "whole": whole, "max": max, "min": min, "divided": divided})
    return function


def python_text(size: Size, names: Mapping[str, str]) -> str:
    """A size as Python source over the variables that `names` gives dimensions; it calls `whole`, `divided`, `max` and `min`.

    Raises ShapeError for a dimension without a variable, FormatError for what is no size.
    """
    if isinstance(size, int):
        return str(int(size))
    if not isinstance(size, sympy.Expr):
        raise FormatError(f"expected a size, an integer or a sympy expression, got a {type(size).__name__}")
    _check_names(size, names)
    return _whole_text(size, names)


def _whole_text(expr: Any, names: Mapping[str, str]) -> str:
    top, bottom = _fraction(expr, names)
    return top if bottom == "1" else f"whole({top}, {bottom}, {str(expr)[:80]!r})"


def _check_names(size: Any, names: Mapping[str, str]) -> None:
    unknown = sorted({str(symbol) for symbol in size.free_symbols} - names.keys())
    if unknown:
        known = ", ".join(names) or "none"
        raise ShapeError(f"size {size}: expected dimensions that have a range ({known}), got {unknown[0]}: give it one")


def _fraction(expr: Any, names: Mapping[str, str]) -> tuple[str, str]:
    """Numerator and denominator, "1" where there is none."""
    top, bottom = sympy.fraction(sympy.together(expr))
    return _text(top, names), _text(bottom, names)


def _text(expr: Any, names: Mapping[str, str]) -> str:
    """A sum of products without quotients, but within functions."""
    if expr.is_Integer:
        return f"({int(expr)})" if expr < 0 else str(int(expr))
    if expr.is_Symbol:
        return names[str(expr)]
    if expr.is_Add:
        return f"({' + '.join(_text(each, names) for each in expr.args)})"
    if expr.is_Mul:
        return "*".join(_text(each, names) for each in expr.args)
    if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
        return f"({_text(expr.base, names)})**{int(expr.exp)}"
    return _function(expr, names)


def _function(expr: Any, names: Mapping[str, str]) -> str:
    if isinstance(expr, sympy.floor):
        return "divided({}, {})".format(*_fraction(expr.args[0], names))
    if isinstance(expr, sympy.ceiling):
        return "(-divided(-({}), {}))".format(*_fraction(expr.args[0], names))
    if isinstance(expr, (sympy.Mod, sympy.Max, sympy.Min)):
        texts = [_whole_text(each, names) for each in expr.args]
        if isinstance(expr, sympy.Mod):
            return f"({texts[0]} - {texts[1]}*divided({texts[0]}, {texts[1]}))"
        return f"{'max' if isinstance(expr, sympy.Max) else 'min'}({', '.join(texts)})"
    read = canonical(expr)  # such as torch's own functions, which read back as these
    if type(read) is type(expr):
        raise FormatError(f"expected a size of whole numbers, floor, ceiling, Mod, Max and Min; got {expr}")
    return _text(sympy.sympify(read), names)


def divided(top: int, bottom: int) -> int:
    """The quotient, rounded down. Raises ShapeError for a division by 0."""
    if bottom == 0:
        raise ShapeError("expected sizes that divide by 1 or more, got a division by 0: let the dimension's range begin at 1")
    return top // bottom


def whole(top: int, bottom: int, text: str) -> int:
    """The quotient of what must be divisible. Raises ShapeError where it is not, for the size that reads like `text`."""
    if divided(top, bottom) * bottom != top:
        raise ShapeError(f"size {text}: expected a whole number, got {top}/{bottom}: give dimensions that it divides")
    return top // bottom


def at(graph: Graph, point: Mapping[str, int]) -> Graph:
    """The graph at a point, by dimension's name; the graph itself where it has no dimensions.

    Raises ShapeError: an unknown or missing dimension, a number out of its range, a size that is no whole number there or is negative.
    """
    return AtPoint(point).graph(graph)


def at_points(points: Iterable[Mapping[str, int]]) -> list[AtPoint]:
    symbolic: dict[Graph, tuple[sympy.Expr, ...]] = {}
    return [AtPoint(point, symbolic) for point in points]


class AtPoint:
    """Graphs of the same dimensions at one point; what several of them share is written once."""

    def __init__(self, point: Mapping[str, int], symbolic: dict[Graph, tuple[sympy.Expr, ...]] | None = None) -> None:
        """`symbolic` is what is known of the sizes of graphs, and takes what is found: several points may share it."""
        self._point = point
        self._symbolic = {} if symbolic is None else symbolic
        self._sizes: dict[Size, Size] = {}
        self._rewriter = Rewriter(self._sizes)

    def graph(self, graph: Graph) -> Graph:
        checked_dimensions(graph.dimensions)
        known, nested = {each.name for each in graph.dimensions}, _has_inner(graph)
        symbolic: list[Size] = []
        sizes = self._symbolic_sizes(graph)
        for size in (size for size in sizes if size not in self._sizes):
            if {str(symbol) for symbol in size.free_symbols} <= known or not nested:
                symbolic.append(size)
            else:  # of a body that has dimensions of its own
                numbers = {each.symbol: sympy.Integer(self._point[each.name]) for each in graph.dimensions}
                self._sizes[size] = canonical(size.xreplace(numbers))
        self._sizes.update(zip(symbolic, sizes_at(symbolic, graph.dimensions, self._point), strict=True))
        return self._rewriter.graph(graph) if sizes or graph.dimensions else graph

    def _symbolic_sizes(self, graph: Graph) -> tuple[sympy.Expr, ...]:
        """The sizes of a graph that are no numbers, each once."""
        if (sizes := self._symbolic.get(graph)) is None:
            sizes = self._symbolic[graph] = tuple(dict.fromkeys(size for size in sizes_of(graph) if not isinstance(size, int)))
        return sizes


def _has_inner(graph: Graph) -> bool:
    """Whether bodies within have dimensions of their own."""
    return any(node.body is not None and (node.body.dimensions or _has_inner(node.body)) for node in graph.nodes)


def sizes_of(graph: Graph) -> Iterator[Size]:
    """Every size that a graph holds, bodies included, some of them many times."""
    for value in graph.inputs:
        yield from _sizes_of_value(value)
    for node in graph.nodes:
        for value in node.results:
            yield from _sizes_of_value(value)
        yield from sizes_of_arg((*node.args, *(arg for _, arg in node.kwargs)))
        if node.body is not None:
            yield from sizes_of(node.body)


def _sizes_of_value(value: Value) -> Iterator[Size]:
    yield from (*value.shape, *value.stride, value.offset, value.storage.nbytes)


def sizes_of_arg(arg: Arg) -> Iterator[Size]:
    """The expressions within an argument, depth first."""
    if isinstance(arg, sympy.Expr):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from sizes_of_arg(item)


class Rewriter:
    """Writes nouns anew with other sizes, each once: whoever asks twice gets the same. What holds none but numbers stays what it is."""

    def __init__(self, instead: Mapping[Size, Size]) -> None:
        self._instead = instead
        self._storages: dict[Storage, Storage] = {}
        self._values: dict[Value, Value] = {}
        self._nodes: dict[Node, Node] = {}
        self._found: dict[tuple[Size, ...], tuple[Size, ...]] = {}

    def graph(self, graph: Graph) -> Graph:
        inputs = tuple(map(self.value, graph.inputs))
        nodes = tuple(map(self.node, graph.nodes))
        return Graph(inputs, nodes, tuple(map(self.value, graph.outputs)))

    def node(self, node: Node) -> Node:
        if node not in self._nodes:
            self._nodes[node] = node if self._stays(node) else self._written(node)
        return self._nodes[node]

    def _stays(self, node: Node) -> bool:
        values = (*node.inputs, *node.results, *(before for before, _ in node.writes), *(value for value, _ in node.inplace))
        if node.body is not None or any(self.value(value) is not value for value in values):
            return False
        return all(self.node(other) is other for other in node.after) and not any(
            True for arg in (*node.args, *(arg for _, arg in node.kwargs)) for _ in sizes_of_arg(arg)
        )

    def _written(self, node: Node) -> Node:
        return Node(
            node.op,
            tuple(map(self._arg, node.args)),
            tuple(None if value is None else self.value(value) for value in node.outputs),
            tuple((name, self._arg(arg)) for name, arg in node.kwargs),
            tuple((self.value(before), self.value(after)) for before, after in node.writes),
            tuple(map(self.node, node.after)),
            tuple((self.value(value), overload) for value, overload in node.inplace),
            None if node.body is None else replace(self.graph(node.body), dimensions=node.body.dimensions),
            node.source,
        )

    def value(self, value: Value) -> Value:
        rewritten = self._values.get(value)
        if rewritten is None:
            shape, stride = self._sizes(value, value.shape), self._sizes(value, value.stride)
            (offset,), storage = self._sizes(value, (value.offset,)), self._storage(value.storage)
            stays = storage is value.storage and (shape, stride, offset) == (value.shape, value.stride, value.offset)
            rewritten = value if stays else Value(value.name, storage, value.dtype, shape, stride, offset, value.version)
            self._values[value] = rewritten
        return rewritten

    def _storage(self, storage: Storage) -> Storage:
        rewritten = self._storages.get(storage)
        if rewritten is None:
            (nbytes,) = self._sizes(storage, (storage.nbytes,))
            rewritten = storage if isinstance(storage.nbytes, int) else Storage(storage.name, nbytes, storage.device, storage.kind)
            self._storages[storage] = rewritten
        return rewritten

    def _sizes(self, owner: Storage | Value, sizes: tuple[Size, ...]) -> tuple[Size, ...]:
        rewritten = self._found.get(sizes)
        if rewritten is None:
            rewritten = tuple(size if isinstance(size, int) else self._instead[size] for size in sizes)
            for size, each in zip(sizes, rewritten, strict=True):
                if isinstance(each, int) and each < 0:
                    expected = f"{owner.name}: expected sizes of 0 or more, got {size} = {each}"
                    raise ShapeError(f"{expected}: let the dimensions' ranges begin higher")
            self._found[sizes] = rewritten
        return rewritten

    def _arg(self, arg: Arg) -> Arg:
        if isinstance(arg, Value):
            return self.value(arg)
        if isinstance(arg, tuple):
            return tuple(map(self._arg, arg))
        return self._instead[arg] if isinstance(arg, sympy.Expr) else arg
