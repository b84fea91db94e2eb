"""A plan as a Python program: one line an operator, in the plan's order, each storage let go right after its last use.

    takes   a checked plan
    leaves  source text that defines `step(inputs)`: the graph's inputs in their order in, its outputs in theirs out;
            a program that may end before the optimizer's writes returns a tuple there;
            `step(inputs, host)` where storages go to the host and back, `runtime.copies` says what it is given then

A graph over dimensions becomes one program for all their numbers: its head reads these from what it is given.

The program calls operators directly; whoever runs it turns autograd and autocast off. Nothing in it comes from a file unchecked:
operators are names of three identifiers, variables are made here, everything else is a literal. A node with a body is a Python loop, see
`loops`; a region is called by its first result's name, from the `regions` that the program is given.
`out=` forms are called only to work in the memory of an input that dies, or of a loop's result: for what is allocated, PyTorch's
allocator or the arena stands.

The head of a program over dimensions reads them from what it is given, then computes each expression that stands among its arguments,
once. The text of an expression is made from its parts (`ir.shapes.evaluate`), its dimensions named by variables of the program's own.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import sympy

from lowtide.errors import FormatError
from lowtide.ir.bodies import Region, is_loop, is_region
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.operators.nodes import is_arithmetic, is_transfer
from lowtide.ir.operators.row import STOP
from lowtide.ir.shapes import evaluate
from lowtide.ir.shapes.dimension import Dimension, DimensionSteps
from lowtide.ir.shapes.evaluate import python_text
from lowtide.ir.shapes.points import sizes_of_arg
from lowtide.ir.sizes import Size
from lowtide.lower import loops, transfers
from lowtide.lower.scatters import Writes
from lowtide.lower.statements import VariableNames, deaths, donated, region_lines, releases, statements, text_of
from lowtide.plan.contents import Contents, Decision
from lowtide.plan.summary import bytes_text


def without_constants(decision: Decision) -> tuple[Decision, tuple[int, ...]]:
    """What decides the same without what regions hold as constants, and which of the inputs it takes. Nothing of it is swapped."""
    graph = decision.graph
    nodes = tuple(_without(node) if is_region(node) else node for node in graph.nodes)
    used = {*graph.outputs, *(value for node in nodes for value in node.inputs)}
    given = tuple(at for at, value in enumerate(graph.inputs) if value in used)
    inputs = tuple(graph.inputs[at] for at in given)
    return Decision(replace(graph, inputs=inputs, nodes=nodes), decision.order, decision.reuses), given


def _without(node: Node) -> Node:
    fixed = set(Region.of(node).fixed)
    args = tuple(arg for at, arg in enumerate(node.args) if at not in fixed)
    return replace(node, args=args, kwargs=tuple((key, () if key == "fixed" else value) for key, value in node.kwargs))


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
        sizes: dict[Any, None] = dict.fromkeys(size for arg in arguments for size in sizes_of_arg(arg))
        needed = {str(symbol) for size in sizes for symbol in size.free_symbols}
        bound = {each.name: fresh(each.name) for each in graph.dimensions if each.name in needed}
        lines = [f"{bound[each.name]} = {_extent(each, graph, variables)}" for each in graph.dimensions if each.name in bound]
        names: dict[Size, str] = {each.symbol: bound[each.name] for each in graph.dimensions if each.name in bound}
        for size, text in ((size, python_text(size, bound)) for size in sizes if size not in names):
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


_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_RESERVED = {
    *keyword.kwlist, "_", "inputs", "host", "step", "torch", "device", "inf", "nan", "abs", "max", "min", "math", "range", "regions",
}  # fmt: skip


def lower(plan: Decision) -> str:
    """The source text of a plan's program, which for a graph over dimensions serves every point of their ranges.

    Raises FormatError for an operator whose name is none, and for a dimension that the program needs and no input has as an extent.
    """
    return "\n".join(line for line, _ in _lines(plan))


def positions(plan: Decision) -> tuple[int, ...]:
    """By line of the program, the first one first: the position in the plan's order of the node that it runs or lets go after; else -1."""
    return tuple(position for _, position in _lines(plan))


def _lines(plan: Decision) -> Iterator[tuple[str, int]]:
    """The program's lines, and the position in the order of the node that each belongs to."""
    graph = plan.graph
    variables, sizes, fresh = _variables(graph)
    names: VariableNames = {**variables, **sizes.names}
    offloaded = transfers.Offloaded.of(graph)
    dying, arrivals = deaths(graph, plan.order, offloaded.storages), transfers.arrivals(plan, offloaded)
    for line in (*_header(plan, sizes), "def step(inputs, host):" if transfers.swaps(plan) else "def step(inputs):"):
        yield line, -1
    yield f"    ({''.join(names[value] + ', ' for value in graph.inputs)}) = inputs" if graph.inputs else "    () = inputs", -1
    if donated(graph):
        yield "    inputs.clear()  # some are given away", -1
    for line in sizes.lines:
        yield f"    {line}", -1
    defined, writes = set(graph.inputs), Writes.of(plan, dying)
    for position, index in enumerate(plan.order):
        node, reuse = graph.nodes[index], plan.reuses[index]
        run: Iterable[str] | None = writes.lines(position, node, names)
        if run is None:
            run = _stop(node, graph, defined, names) if node.op == STOP else _run(node, reuse, names, offloaded, fresh)
        for line in (
            *transfers.waits(arrivals.before.get(position, ()), names),
            *run,
            *transfers.waits(arrivals.after.get(position, ()), names),
            *releases(dying[position], names, node, reuse),
        ):
            yield f"    {line}", position
        defined.update(node.results)
    yield f"    return [{', '.join(names[value] for value in graph.outputs)}]", len(plan.order)
    yield "", -1


def _run(node: Node, reuse: int, names: VariableNames, offloaded: transfers.Offloaded, fresh: Callable[[str], str]) -> Iterator[str]:
    if is_loop(node):
        return loops.lines(node, reuse, names, fresh)
    return region_lines(node, names) if is_region(node) else statements(node, reuse, names, offloaded)


def _stop(node: Node, graph: Graph, defined: set[Value], names: VariableNames) -> Iterator[str]:
    """The line that may end the program: with a tuple, and None for an output that is not made yet."""
    outputs = "".join(f"{names[value] if value in defined else None}, " for value in graph.outputs)
    yield f"if {text_of(node.args[0], names)}: return ({outputs})"


def namespaces(graph: Graph) -> tuple[str, ...]:
    """The operator libraries that a graph's program calls, by name."""
    called = (node for node in _all_nodes(graph) if not (is_arithmetic(node) or is_transfer(node) or is_loop(node) or is_region(node)))
    return tuple(sorted({"aten"} | {node.op.split(".")[0] for node in called}))


def _all_nodes(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        yield node
        if node.body is not None and not is_region(node):  # that is compiled
            yield from _all_nodes(node.body)


def _header(plan: Decision, sizes: Sizes) -> Iterator[str]:
    yield f"# {len(plan.order)} operators; {_promise(plan)}"
    yield "from torch import device, inf, nan, ops"
    yield "import torch"
    if sizes.called:
        yield f"from {evaluate.__name__} import {', '.join(sizes.called)}"
    if any(node.op.startswith("py.math_") for node in plan.graph.nodes):
        yield "import math"
    for name in namespaces(plan.graph):
        if not _VARIABLE.fullmatch(name):
            raise FormatError(f"expected the name of an operator library, got {name!r}")
        yield f"{name} = ops.{name}"
    yield ""


def _promise(plan: Decision) -> str:
    """What a program takes, where that is a number; else for what it is."""
    if plan.graph.dimensions:
        return f"for {', '.join(map(str, plan.graph.dimensions))}"
    if not isinstance(plan, Contents):
        return "of which nothing was promised"
    return f"promised peak {bytes_text(plan.peak_bytes)}, of which {bytes_text(plan.resident_bytes)} are the caller's"


def _variables(graph: Graph) -> tuple[dict[Value, str], Sizes, Callable[[str], str]]:
    """A Python variable for each value, those of sizes, and what makes further ones.

    The versions of what the caller owns are one tensor, hence one variable.
    """
    taken = _RESERVED | set(namespaces(graph)) | (set(CALLED) if graph.dimensions else set())
    names: dict[Value, str] = {}
    for value in graph.inputs:
        names[value] = _fresh(value.name, taken)
    for node in graph.nodes:
        for output in node.outputs:
            if output is not None:
                names[output] = _fresh(output.name, taken)
        for before, after in node.writes:
            names[after] = names[before]
    fresh = partial(_fresh, taken=taken)
    return names, Sizes.of(graph, names, fresh), fresh


def _fresh(name: str, taken: set[str]) -> str:
    name = name if _VARIABLE.fullmatch(name) else "v"
    while name in taken:
        name += "_"
    taken.add(name)
    return name
