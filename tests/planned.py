"""Plans of graphs made up."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.ir.graph import Graph, Kind, Node, Source, Storage
from lowtide.plan.plan import Plan, Provenance
from lowtide.planning.candidate import Candidate
from lowtide.planning.planner import Planner
from lowtide.planning.request import Budget, Effort, Request
from tests.graphs import array

PROVENANCE = Provenance("0.1.0", "2.13.0", "cpu", "3.11.7", 2)


def plan(candidates: Sequence[Candidate], request: Request) -> Plan:
    """A checked plan of one program."""
    return Planner([candidates]).plans(request)[-1]


def chain(count: int, module: str = "block") -> Graph:
    """A forward and a backward pass: each gradient reads what the forward pass made."""
    x = array(Storage("x", 64, "cpu", Kind.INPUT))
    nodes, values = [], [x]
    for index in range(count // 2):
        made = array(Storage(f"a{index}", 4096, "cpu", Kind.ACTIVATION))
        nodes.append(Node("aten.make.default", (values[-1],), (made,), source=Source("model.py", index + 1, f"{module}.{index % 12}")))
        values.append(made)
    gradient = values[-1]
    for index in reversed(range(count // 2)):
        made = array(Storage(f"g{index}", 4096, "cpu", Kind.GRADIENT))
        nodes.append(Node("aten.make.default", (gradient, values[index]), (made,), source=Source("model.py", index + 1, module)))
        gradient = made
    return Graph((x,), tuple(nodes), (gradient,))


def plan_of(graph: Graph, memory_bytes: int | None = None) -> Plan:
    """Planned, with a limit where one is given; each node takes a microsecond more than the one before."""
    us = tuple(float(1 + index) for index in range(len(graph.nodes))) if memory_bytes is not None else ()
    budget = Budget() if memory_bytes is None else Budget(memory_bytes)
    return plan([Candidate(graph, (0,) * len(graph.nodes), us)], Request(PROVENANCE, budget, sweeps=Effort.QUICK.sweeps))
