"""A program whose changing numbers are tensors, so that what was recorded of its launches reads them anew.

    takes   a decision about a program
    leaves  the same decision with tensors of no dimensions in the places of numbers, and the arithmetic that says what these are now

Only where the bits stay the same. A product or a quotient of float32 or float64 by a number rounds once, as it does by a tensor of that
dtype that holds the number rounded to it. With half precision it does not: kernels multiply by the number in float32, where a tensor has
lost its lower bits. Sums with `alpha=`, `addcdiv` and `lerp` take numbers alone, or contract otherwise with tensors. A quotient on CUDA
multiplies by the number's inverse, where one by a tensor divides, but in lists that go the quick way: those of single elements do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lowtide.ir.graph import Graph, Kind, Node, Storage, Value, arguments, values_of
from lowtide.ir.operators.nodes import is_arithmetic, row_of
from lowtide.ir.sizes import ITEM_BYTES
from lowtide.plan.contents import Decision

_DTYPES = ("float32", "float64")


@dataclass(frozen=True, eq=False)
class NumberTensors:
    """A decision whose graph takes tensors behind its other inputs."""

    decision: Decision
    arithmetic: Decision  # of the program's numbers: what the tensors hold, in their order
    numbers: tuple[int, ...]  # inputs of the program that the arithmetic takes
    dtypes: tuple[str, ...]  # by tensor
    free: frozenset[int]  # inputs of the program that reach it by these tensors alone

    @classmethod
    def of(cls, decision: Decision, device: str) -> NumberTensors | None:
        """None where each number has a use that no tensor can stand in."""
        graph = decision.graph
        numbers = [at for at, value in enumerate(graph.inputs) if value.storage.kind is Kind.SCALAR]
        sources = _sources(graph, [graph.inputs[at] for at in numbers])
        runs = [(node, decision.reuses[index]) for index, node in enumerate(graph.nodes)]
        uses = [use for node, reuse in runs if not is_arithmetic(node) for use in _uses(node, reuse)]
        fixed = {source for value, dtype in uses if not dtype for source in sources.get(value, ())}
        fixed |= {source for value in graph.outputs for source in sources.get(value, ())}
        loose = {graph.inputs[at] for at in numbers} - fixed
        wanted = dict.fromkeys(use for use in uses if not loose.isdisjoint(sources.get(use[0], ())))
        if not wanted:
            return None
        free = frozenset(at for at in numbers if graph.inputs[at] in loose and any(graph.inputs[at] in sources[each] for each, _ in wanted))
        tensors = {use: _tensor(*use, device) for use in wanted}
        nodes = tuple(_with_tensors(node, reuse, tensors) for node, reuse in runs)
        taking = Decision(replace(graph, inputs=(*graph.inputs, *tensors.values()), nodes=nodes), decision.order, decision.reuses)
        arithmetic = tuple(node for node in (graph.nodes[index] for index in decision.order) if _reaches(node, sources))
        bare = Graph(tuple(graph.inputs[at] for at in numbers), arithmetic, tuple(value for value, _ in wanted))
        return cls(taking, Decision.in_order(bare), tuple(numbers), tuple(dtype for _, dtype in wanted), free)


def _sources(graph: Graph, numbers: list[Value]) -> dict[Value, set[Value]]:
    """By value of Python's: the numbers among the inputs that it follows from, where it follows from these alone."""
    sources: dict[Value, set[Value]] = {value: {value} for value in numbers}
    for node in graph.nodes:
        if is_arithmetic(node) and all(value in sources for value in node.inputs):
            for result in node.results:
                sources[result] = {source for value in node.inputs for source in sources[value]}
    return sources


def _reaches(node: Node, sources: Mapping[Value, set[Value]]) -> bool:
    return is_arithmetic(node) and bool(node.results) and all(result in sources for result in node.results)


def _uses(node: Node, reuse: int) -> list[tuple[Value, str]]:
    """The numbers that an operator is given, each with the dtype of a tensor that could stand there; "" where none can."""
    return [(value, _dtype(node, reuse, value)) for value in node.inputs if value.storage.kind is Kind.SCALAR]


def _dtype(node: Node, reuse: int, number: Value) -> str:
    called = node.op, node.op if reuse < 0 else node.inplace[reuse][1]
    if not all(map(_by_tensor, called)) or len(node.args) < 2 or node.args[1] is not number:
        return ""
    given = values_of(node.args[0])
    if "div" in node.op and any(value.shape for value in given):
        return ""
    elsewhere = any(value is number for arg in (*node.args[2:], *(arg for _, arg in node.kwargs)) for value in values_of(arg))
    dtypes = {value.dtype for value in (*given, *(each for each in node.outputs if each is not None))}
    return dtypes.pop() if not elsewhere and len(dtypes) == 1 and dtypes <= set(_DTYPES) else ""


def _tensor(number: Value, dtype: str, device: str) -> Value:
    storage = Storage(f"{number.name}_as_{dtype}", ITEM_BYTES[dtype], device, Kind.CONSTANT)
    return Value(storage.name, storage, dtype, (), ())


def _with_tensors(node: Node, reuse: int, tensors: Mapping[tuple[Value, str], Value]) -> Node:
    """The same node, or one with a tensor for its number."""
    by_value = {value: tensors[value, dtype] for value, dtype in _uses(node, reuse) if (value, dtype) in tensors}
    if not by_value or is_arithmetic(node):
        return node
    inplace = tuple((value, _by_tensor(op) or op) for value, op in node.inplace)
    changed: dict[str, Any] = arguments(node, lambda value: by_value.get(value, value))
    return replace(node, op=_by_tensor(node.op), inplace=inplace, **changed)


def _by_tensor(op: str) -> str:
    """The operator that takes a tensor for its number; "" where none does."""
    overload = row_of(op).by_tensor
    return f"{op.rpartition('.')[0]}.{overload}" if overload else ""
