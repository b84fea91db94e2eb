"""The sizes that a program computes at its head: dimensions, read from what it is given, then what its arguments make of them, each once.

    takes   a graph over dimensions
    leaves  lines, and a variable for every expression that stands among its arguments

The text of an expression is made from its parts (`ir.shapes.evaluate`), its dimensions named by variables of the program's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from lowtide.errors import FormatError
from lowtide.ir.graph import Graph, Value
from lowtide.ir.shapes.at import sizes_of_arg
from lowtide.ir.shapes.dimension import Dimension, DimensionSteps
from lowtide.ir.shapes.evaluate import python_text
from lowtide.ir.sizes import Size

CALLED = ("divided", "whole")  # of `ir.shapes.evaluate`, by the text of a size


@dataclass(frozen=True)
class Sizes:
    """What a program's head says of sizes."""

    names: Mapping[Size, str]  # by expression, its variable
    lines: tuple[str, ...]  # that set the variables, in the step, after its inputs have theirs
    called: tuple[str, ...]  # of `CALLED`: what the program has to import

    @classmethod
    def of(cls, graph: Graph, variables: Mapping[Value, str], fresh: Callable[[str], str]) -> Sizes:
        """Of the expressions among a graph's arguments; `fresh` gives a variable that nothing else has.

        Raises FormatError where no input has a dimension as its extent, so that a batch would not say it; ShapeError for an expression over
        what is no dimension of the graph.
        """
        arguments = (arg for node in graph.nodes for arg in (*node.args, *(arg for _, arg in node.kwargs)))
        asked: dict[Any, None] = dict.fromkeys(size for arg in arguments for size in sizes_of_arg(arg))
        needed = {str(symbol) for size in asked for symbol in size.free_symbols}
        bound = {each.name: fresh(each.name) for each in graph.dimensions if each.name in needed}
        lines = [f"{bound[each.name]} = {_extent(each, graph, variables)}" for each in graph.dimensions if each.name in bound]
        names: dict[Size, str] = {each.symbol: bound[each.name] for each in graph.dimensions if each.name in bound}
        for size, text in ((size, python_text(size, bound)) for size in asked if size not in names):
            names[size] = fresh(f"n{len(names) - len(bound)}")
            lines.append(f"{names[size]} = {text}")
        return cls(names, tuple(lines), tuple(name for name in CALLED if any(f"{name}(" in line for line in lines)))


def _extent(dimension: Dimension, graph: Graph, variables: Mapping[Value, str]) -> str:
    """Where a batch says the number of a dimension: the first extent of an input that is just that, or counted by it."""
    for value, position in _extents(graph, dimension.extent(dimension.symbol)):
        return _counted(f"{variables[value]}.size({position})", dimension.steps)
    raise FormatError(f"dimension {dimension.name}: expected an input one of whose extents is {dimension.name}, so that a batch says it")


def _counted(extent: str, steps: DimensionSteps | None) -> str:
    if steps is None:
        return extent
    return f"({extent} - {steps.offset}) // {steps.step}" if steps.offset else f"{extent} // {steps.step}"


def _extents(graph: Graph, extent: Any) -> Iterator[tuple[Value, int]]:
    return ((value, position) for value in graph.inputs for position, each in enumerate(value.shape) if sympy.sympify(each) == extent)
