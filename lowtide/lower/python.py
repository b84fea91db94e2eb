"""A plan as a Python program: one line an operator, in the plan's order, each storage let go right after its last use.

    takes   a checked plan
    leaves  source text that defines `step(inputs)`: the graph's inputs in their order in, its outputs in theirs out;
            a program that may end before the optimizer's writes returns a tuple there;
            `step(inputs, host)` where storages go to the host and back, `runtime.copies.host` says what it is given then

A graph over dimensions becomes one program for all their numbers: its head reads these from what it is given, see `sizes`.

The program calls operators directly; whoever runs it turns autograd and autocast off. Nothing in it comes from a file unchecked:
operators are names of three identifiers, variables are made here, everything else is a literal. `out=` forms are called only to work in the
memory of an input that dies: for what is allocated, PyTorch's allocator or the arena stands.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, TypeAlias

import sympy
import torch

from lowtide.cost.lab.operators import operator
from lowtide.errors import FormatError
from lowtide.ir.graph import Arg, Atom, Graph, Kind, Node, Storage, Value
from lowtide.ir.operators.names import AS_STRIDED, ITEM, MATH_FUNCTIONS, SCATTER, STOP
from lowtide.ir.operators.nodes import is_arithmetic, is_transfer
from lowtide.ir.shapes import evaluate
from lowtide.ir.sizes import Size
from lowtide.lower import transfers
from lowtide.lower.sizes import CALLED, Sizes
from lowtide.plan.contents import Contents, Decision
from lowtide.plan.summary import bytes_text

_OPERATOR = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*\.[A-Za-z_]\w*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_BINARY = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}
_RESERVED = {*keyword.kwlist, "_", "inputs", "host", "step", "torch", "device", "inf", "nan", "abs", "max", "min", "math"}

Names: TypeAlias = dict[Any, str]  # the variable of each value, and of each expression among the arguments


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
    variables, sizes = _variables(graph)
    names: Names = {**variables, **sizes.names}
    offloaded = transfers.Offloaded.of(graph)
    dying, arrivals = _deaths(plan, offloaded), transfers.arrivals(plan, offloaded)
    for line in (*_header(plan, sizes), "def step(inputs, host):" if transfers.swaps(plan) else "def step(inputs):"):
        yield line, -1
    yield f"    ({''.join(names[value] + ', ' for value in graph.inputs)}) = inputs" if graph.inputs else "    () = inputs", -1
    for line in sizes.lines:
        yield f"    {line}", -1
    made = set(graph.inputs)
    for position, index in enumerate(plan.order):
        node, reuse = graph.nodes[index], plan.reuses[index]
        for line in (
            *transfers.waits(arrivals.before.get(position, ()), names),
            *(_statements(node, reuse, names, offloaded) if node.op != STOP else _stop(node, graph, made, names)),
            *transfers.waits(arrivals.after.get(position, ()), names),
            *_releases(dying[position], names, node, reuse),
        ):
            yield f"    {line}", position
        made.update(node.results)
    yield f"    return [{', '.join(names[value] for value in graph.outputs)}]", len(plan.order)
    yield "", -1


def _stop(node: Node, graph: Graph, made: set[Value], names: Names) -> Iterator[str]:
    """The line that may end the program: with a tuple, and None for an output that is not made yet."""
    outputs = "".join(f"{names[value] if value in made else None}, " for value in graph.outputs)
    yield f"if {_text(node.args[0], names)}: return ({outputs})"


def namespaces(graph: Graph) -> tuple[str, ...]:
    """The operator libraries that a graph's program calls, by name."""
    return tuple(sorted({"aten"} | {node.op.split(".")[0] for node in graph.nodes if not (is_arithmetic(node) or is_transfer(node))}))


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
    assert isinstance(plan, Contents), "a graph of numbers has a plan"
    return f"promised peak {bytes_text(plan.peak_bytes)}, of which {bytes_text(plan.resident_bytes)} are the caller's"


def _variables(graph: Graph) -> tuple[dict[Value, str], Sizes]:
    """A Python variable for each value, then those of sizes. The versions of what the caller owns are one tensor, hence one variable."""
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
    return names, Sizes.of(graph, names, partial(_fresh, taken=taken))


def _fresh(name: str, taken: set[str]) -> str:
    name = name if _VARIABLE.fullmatch(name) else "v"
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _deaths(plan: Decision, offloaded: transfers.Offloaded) -> list[list[tuple[Storage, list[Value]]]]:
    """By position in the order: the storages whose last use that is, with the values on them that exist by then."""
    graph, owned = plan.graph, {value.storage for value in plan.graph.inputs}
    kept = owned | offloaded.storages | {value.storage for value in graph.outputs}
    last: dict[Storage, int] = {}
    on: dict[Storage, list[Value]] = {}
    for position, index in enumerate(plan.order):
        node = graph.nodes[index]
        for value in (*node.inputs, *node.results):
            last[value.storage] = position
        for output in node.outputs:
            if output is not None:
                on.setdefault(output.storage, []).append(output)
    dying: list[list[tuple[Storage, list[Value]]]] = [[] for _ in plan.order]
    for storage, position in last.items():
        if storage not in kept:
            dying[position].append((storage, on[storage]))
    return dying


def _releases(dying: list[tuple[Storage, list[Value]]], names: Names, node: Node, reuse: int) -> Iterator[str]:
    """The line that lets storages go: their variables are all that holds them."""
    if not dying:
        return
    variables = [names[value] for _, values in dying for value in values]
    taken = node.inplace[reuse][0].storage if reuse >= 0 else None
    freed: Size = 0
    for storage, _ in dying:
        if storage is not taken and storage.kind is not Kind.HOST:  # what is taken lives on under another name
            freed = freed + storage.nbytes
    note = f"  # frees {transfers.size_text(freed)}" if freed != 0 else ""
    yield f"del {', '.join(variables)}{note}"


def _statements(node: Node, reuse: int, names: Names, offloaded: transfers.Offloaded) -> Iterator[str]:
    """The lines that run one node."""
    if is_transfer(node):
        yield from transfers.statements(node, names, offloaded)
    elif is_arithmetic(node):
        yield f"{names[node.results[0]]} = {_arithmetic(node, names)}"
    elif node.op == ITEM:
        yield f"{names[node.results[0]]} = {_text(node.args[0], names)}.item()"
    elif reuse >= 0 and node.op == SCATTER:
        yield from _scatter_in_place(node, names)
    else:
        call = _call_in_place(node, reuse, names) if reuse >= 0 else _call(node.op, node.args, node.kwargs, names)
        yield from _assign(node, call, names)


def _assign(node: Node, call: str, names: Names) -> Iterator[str]:
    """Bind a call's results. What nobody wants must not stay bound, or it would stay alive."""
    if not any(output is not None for output in node.outputs):
        yield f"{call}{_comment(node)}"
    elif len(node.outputs) == 1 and not _returns_list(node.op):
        yield f"{names[node.results[0]]} = {call}{_comment(node)}"
    else:
        targets = [names[output] if output is not None else "_" for output in node.outputs]
        yield f"{', '.join(targets)}{',' if len(targets) == 1 else ''} = {call}{_comment(node)}"
        if "_" in targets:
            yield "del _"


def _call(op: str, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...], names: Names) -> str:
    if not _OPERATOR.fullmatch(op):
        raise FormatError(f"expected an operator's name such as 'aten.add.Tensor', got {op!r}")
    given = [_text(arg, names) for arg in args] + [f"{_keyword(key)}={_text(arg, names)}" for key, arg in kwargs]
    return f"{op}({', '.join(given)})"


def _call_in_place(node: Node, reuse: int, names: Names) -> str:
    """The overload that works in the memory of one of its inputs."""
    value, overload = node.inplace[reuse]
    outs = [argument.name for argument in _schema(overload).arguments if argument.kwarg_only and argument.alias_info is not None]
    return _call(overload, node.args, (*node.kwargs, *((name, value) for name in outs)), names)


def _scatter_in_place(node: Node, names: Names) -> Iterator[str]:
    """`as_strided_scatter` has no overload that works in place: it is a copy into a view."""
    base, update, *view = node.args
    yield f"{names[node.results[0]]} = {_text(base, names)}{_comment(node)}"
    yield f"aten.copy_.default({_call(AS_STRIDED, (base, *view), (), names)}, {_text(update, names)})"


def _arithmetic(node: Node, names: Names) -> str:
    op, operands = node.op.removeprefix("py."), [_text(arg, names) for arg in node.args]
    if op in _BINARY:
        return f" {_BINARY[op]} ".join(operands)
    if op in ("neg", "abs"):
        return f"-{operands[0]}" if op == "neg" else f"abs({operands[0]})"
    if op in ("max", "min") or (op.startswith("math_") and op.removeprefix("math_") in MATH_FUNCTIONS):
        return f"{op.replace('math_', 'math.', 1)}({', '.join(operands)})"
    raise FormatError(f"expected arithmetic on numbers, one of {', '.join(_BINARY)}, neg, abs, max, min, math_sqrt; got {node.op!r}")


def _text(arg: Arg, names: Names) -> str:
    """An argument as Python source."""
    if isinstance(arg, Value):
        return names[arg]
    if isinstance(arg, tuple):
        return f"[{', '.join(_text(item, names) for item in arg)}]"
    if isinstance(arg, Atom):
        return f"device({arg.name!r})" if arg.kind == "device" else f"torch.{_keyword(arg.name)}"
    if arg is None or isinstance(arg, (bool, int, float, complex, str)):
        return f"({arg!r})" if isinstance(arg, (int, float)) and not isinstance(arg, bool) and arg < 0 else repr(arg)
    if isinstance(arg, sympy.Expr):
        return names[arg]
    raise FormatError(f"expected an argument that a program can spell, got a {type(arg).__name__}")


def _keyword(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise FormatError(f"expected an identifier, got {name!r}")
    return name


def _schema(op: str) -> torch.FunctionSchema:
    return operator(op)._schema


def _returns_list(op: str) -> bool:
    return isinstance(_schema(op).returns[0].type, torch.ListType)


def _comment(node: Node) -> str:
    """Shape and size of what a node makes, and where it comes from."""
    made = next((output for output in node.outputs if output is not None), None)
    what = f"{made.dtype}[{', '.join(map(str, made.shape))}]" if made is not None else ""
    where = f"{node.source.module}:{node.source.line}" if node.source is not None and node.source.module else ""
    return f"  # {' '.join(filter(None, (what, where)))}" if what or where else ""
