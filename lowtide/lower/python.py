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
once. The text of an expression is made from its parts (`ir.shapes.points`), its dimensions named by variables of the program's own.

Element-wise operators compute where the scatter after them writes, as the user's program did:

t = aten.add.Tensor(v, y)            # v lies in b
c = as_strided_scatter(b, t, ...)    # where v lies, in the memory of b
w = aten.as_strided(c, ...)          # as v lies

w = aten.add_.Tensor(v, y)           # the same bits: what is read lies as it did, so the kernel goes through it as it did
c = b
"""

from __future__ import annotations

import functools
import keyword
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import sympy
import torch

from lowtide.base.messages import bytes_text
from lowtide.cost.operators import operator
from lowtide.errors import FormatError
from lowtide.ir.bodies import Region, is_loop, is_region, run_nodes
from lowtide.ir.graph import Graph, Node, Storage, Value, free_name
from lowtide.ir.operators.nodes import is_arithmetic, is_random, is_transfer
from lowtide.ir.operators.row import AS_STRIDED, SCATTER, STOP
from lowtide.ir.shapes import points
from lowtide.ir.shapes.dimension import Dimension, DimensionSteps
from lowtide.ir.shapes.points import python_text, sizes_of_arg
from lowtide.ir.sizes import Size, contiguous_stride
from lowtide.lower import loops, statements
from lowtide.lower.statements import arrivals as arrivals_of
from lowtide.plan.contents import Contents, Decision

Dying = list[list[tuple[Storage, list[Value]]]]


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


CALLED = ("divided", "whole")  # of `ir.shapes.points`, by the text of a size


@dataclass(frozen=True)
class Sizes:
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
    names: statements.VariableNames = {**variables, **sizes.names}
    offloaded = statements.Offloaded.of(graph)
    dying, arrivals = statements.deaths(graph, plan.order, offloaded.storages), arrivals_of(plan, offloaded)
    for line in (*_header(plan, sizes), "def step(inputs, host):" if statements.swaps(plan) else "def step(inputs):"):
        yield line, -1
    yield f"    ({''.join(names[value] + ', ' for value in graph.inputs)}) = inputs" if graph.inputs else "    () = inputs", -1
    if statements.donated(graph):
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
            *statements.waits(arrivals.before.get(position, ()), names),
            *run,
            *statements.waits(arrivals.after.get(position, ()), names),
            *statements.releases(dying[position], names, node, reuse),
        ):
            yield f"    {line}", position
        defined.update(node.results)
    yield f"    return [{', '.join(names[value] for value in graph.outputs)}]", len(plan.order)
    yield "", -1


def _run(
    node: Node, reuse: int, names: statements.VariableNames, offloaded: statements.Offloaded, fresh: Callable[[str], str]
) -> Iterator[str]:
    if is_loop(node):
        return loops.lines(node, reuse, names, fresh)
    return statements.region_lines(node, names) if is_region(node) else statements.statements(node, reuse, names, offloaded)


def _stop(node: Node, graph: Graph, defined: set[Value], names: statements.VariableNames) -> Iterator[str]:
    """The line that may end the program: with a tuple, and None for an output that is not made yet."""
    outputs = "".join(f"{names[value] if value in defined else None}, " for value in graph.outputs)
    yield f"if {statements.text_of(node.args[0], names)}: return ({outputs})"


def namespaces(graph: Graph) -> tuple[str, ...]:
    """The operator libraries that a graph's program calls, by name."""
    called = (node for node in run_nodes(graph) if not (is_arithmetic(node) or is_transfer(node) or is_loop(node) or is_region(node)))
    return tuple(sorted({"aten"} | {node.op.split(".")[0] for node in called}))


def _header(plan: Decision, sizes: Sizes) -> Iterator[str]:
    yield f"# {len(plan.order)} operators; {_promise(plan)}"
    yield "from torch import device, inf, nan, ops"
    yield "import torch"
    if sizes.called:
        yield f"from {points.__name__} import {', '.join(sizes.called)}"
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
    return free_name(name if _VARIABLE.fullmatch(name) else "v", taken)


class Writes(NamedTuple):
    """By position in the order, what becomes of nodes that write in place."""

    calls: Mapping[int, tuple[str, Value | None]]  # the operator that works in place, and the value that its result is, if any
    scatters: Collection[int]  # of which nothing is left but another name
    views: Collection[int]  # of which nothing is left

    @classmethod
    def of(cls, plan: Decision, dying: Dying) -> Writes:
        """Takes out of `dying` what is not made any more."""
        nodes = [plan.graph.nodes[index] for index in plan.order]
        calls, scatters, views = dict[int, tuple[str, Value | None]](), set[int](), set[int]()
        for at, (node, scatter) in enumerate(pairwise(nodes), 1):
            overload = _overload(node, scatter) if scatter.op == SCATTER and plan.reuses[plan.order[at]] >= 0 else None
            dead = next((entry for entry in dying[at] if entry[1] == [*node.outputs]), None)
            if overload is not None and dead is not None:
                dying[at].remove(dead)
                view = _view(scatter, nodes[at + 1]) if at + 1 < len(nodes) else None
                calls[at - 1] = overload, view
                scatters.add(at)
                views |= set() if view is None else {at + 1}
        return cls(calls, scatters, views)

    def lines(self, position: int, node: Node, names: statements.VariableNames) -> list[str] | None:
        """What is left of a node; None where all of it is."""
        if position in self.views:
            return []
        if position in self.scatters:
            return [statements.renamed(node, names)]
        if position not in self.calls:
            return None
        overload, view = self.calls[position]
        text = statements.call(overload, node.args, node.kwargs, names)
        return [f"{text}{statements.comment(node)}" if view is None else f"{names[view]} = {text}{statements.comment(node)}"]


def _overload(node: Node, scatter: Node) -> str | None:
    """The operator that computes a node in place, where its first argument lies just where the scatter writes what it makes."""
    base, update, *where = scatter.args
    if node.writes or node.body is not None or is_random(node) or node.outputs != (update,) or not node.op.startswith("aten."):
        return None
    first, result = node.args[0] if node.args else None, node.outputs[0]
    if not (isinstance(base, Value) and isinstance(first, Value) and result is not None and first.storage is base.storage):
        return None
    same = [first.dtype, first.shape, *where] == [base.dtype, result.shape, *_geometry(first)] and result.dtype == base.dtype
    if not same or base.dtype.startswith("complex"):  # a complex division in place takes another loop, and gives other bits
        return None
    others = [value for value in node.inputs if value.storage is base.storage and _geometry(value) != _geometry(first)]
    return _in_place(node.op) if all(_is_apart(value, first, base) for value in others) else None


def _geometry(value: Value) -> list[Any]:
    return [value.shape, value.stride, value.offset]


def _view(scatter: Node, after: Node) -> Value | None:
    """The view that the node after a scatter makes of what was written, if it does."""
    return after.outputs[0] if after.op == AS_STRIDED and after.args == (scatter.outputs[0], *scatter.args[2:5]) else None


@functools.cache
def _in_place(op: str) -> str | None:
    """ "aten.add_.Tensor" for "aten.add.Tensor", where that is element-wise and takes the same arguments."""
    form, (namespace, base, overload) = operator(op), op.split(".")
    written = getattr(getattr(getattr(torch.ops, namespace), f"{base}_", None), overload, None)
    if written is None or torch.Tag.pointwise not in form.tags or len(form._schema.returns) != 1 or form._schema.is_mutable:
        return None
    mine, its = ([(a.name, str(a.type)) for a in each._schema.arguments] for each in (form, written))
    return f"{namespace}.{base}_.{overload}" if mine == its else None


def _is_apart(value: Value, first: Value, base: Value) -> bool:
    """Whether two views of a dense tensor share no element, as they are blocks of it with no index in common along some dimension."""
    steps = contiguous_stride(base.shape)
    blocks = [_block(view, base, steps) for view in (value, first)]
    if base.stride != steps or not all(blocks):
        return False
    return any(start >= other + more or other >= start + extent for (start, extent), (other, more) in zip(*blocks, strict=True))


def _block(view: Value, base: Value, steps: Sequence[Any]) -> list[tuple[int, int]]:
    """Where a view begins and how far it goes along each dimension of its base; empty where it is no block, or sizes are no numbers."""
    if not all(isinstance(size, int) for size in (*view.shape, *view.stride, *base.shape, view.offset, base.offset)):
        return []
    left, block = view.offset - base.offset, []
    extents = {step: size for step, size in zip(view.stride, view.shape, strict=True) if size > 1}
    for step, whole in zip(steps, base.shape, strict=True):
        start, extent = left // step, extents.get(step, 1)
        left -= start * step
        block.append((start, extent))
        if start + extent > whole:
            return []
    return block if sum(size > 1 for size in view.shape) == sum(extent > 1 for _, extent in block) else []
