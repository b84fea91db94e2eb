"""Programs captured as graphs and run as they stand, whole or with some of their nodes split."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import lowtide
from bench.in_values import in_values
from lowtide.cost.bodies import workspaces_within
from lowtide.cost.memory import order_problem, simulate
from lowtide.ir.bodies import is_loop
from lowtide.ir.check.graph_check import check_graph
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.text.graph_text import parse, to_text
from lowtide.lower.python import lower
from lowtide.plan.plan import Plan
from lowtide.runtime.program import Program
from lowtide.split.dimensions import DimensionGraph
from lowtide.split.parts import Split
from lowtide.split.sets import Regions


class Function(nn.Module):
    """A function of parameters and a batch as a module."""

    def __init__(self, function: Callable[..., Any], *parameters: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.own = nn.ParameterList(nn.Parameter(each) for each in parameters)

    def forward(self, *batch: torch.Tensor) -> Any:
        return self.function(*batch, *self.own)


@dataclasses.dataclass(frozen=True, eq=False)
class Captured:
    """A training step, or a call, as a graph, and what it is given."""

    plan: Plan
    inputs: list[Any]

    @property
    def graph(self) -> Graph:
        return self.plan.graph

    def run(self, graph: Graph | None = None) -> list[torch.Tensor]:
        """What a graph that was made of this one returns, then what it leaves in all that it is given."""
        plan = planned(self.plan, graph or self.graph)
        given = [each.clone() if isinstance(each, torch.Tensor) else each for each in self.inputs]
        outputs = Program(lower(plan), gradients=False)(given)
        return [*outputs, *(each for each in given if isinstance(each, torch.Tensor))]


def planned(plan: Plan, graph: Graph) -> Plan:
    """A plan of a graph as it stands, with what it takes."""
    sizes = workspaces_within(graph.nodes)
    problem, order = order_problem(graph, sizes), tuple(range(len(graph.nodes)))
    footprint = simulate(problem, order)
    return dataclasses.replace(
        plan, graph=graph, order=order, reuses=tuple(footprint.reuses.tolist()), workspace_bytes=sizes, peak_bytes=footprint.peak_bytes,
        lower_bound_bytes=problem.resident_bytes, peak=None, status="feasible",
    )  # fmt: skip


def captured(
    function: Callable[..., Any], batch: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor] = (), optimizer: Any = None
) -> Captured:
    """A function's call, or with an optimizer its training step, whose loss is what it returns."""
    model = Function(function, *parameters)
    training = {} if optimizer is None else {"loss": lambda model, *batch: model(*batch), "optimizer": optimizer(model.parameters())}
    step = lowtide.optimize(model, tuple(batch), **in_values(workspaces=False, progress=False, **training))
    if optimizer is not None:
        step(*batch)  # so that there is state
    variant, inputs, _ = step._prepare(tuple(batch), {})
    return Captured(variant.plan, list(inputs))


def made(graph: Graph, op: str, which: int = 0) -> Value:
    """What the operator makes that is named so, the first or another one."""
    value = nodes_of(graph, op)[which].outputs[0]
    assert value is not None
    return value


def nodes_of(graph: Graph, *ops: str) -> list[Node]:
    """The nodes whose operators are named so, in program order: "mm" is "aten.mm.default"."""
    return [node for node in graph.nodes if node.op.split(".")[1] in ops]


def checked(graph: Graph) -> Graph:
    """A graph with a loop that the checker lets pass, and that is the same read back from text."""
    check_graph(graph)
    text = to_text(graph)
    assert any(map(is_loop, graph.nodes))
    assert to_text(parse(text)) == text
    check_graph(parse(text))
    return graph


def set_around(graph: Graph, value: Value, dim: int, places: Sequence[int] | None = None) -> Split | None:
    """The set around a tensor along one of its dimensions, of nodes at some places; None where there is none."""
    wanted = range(len(graph.nodes)) if places is None else places
    region = Regions(DimensionGraph.of(graph)).around(value, dim, wanted)
    return None if region is None else Split({graph.nodes[place]: axis for place, axis in region.axes.items()})
