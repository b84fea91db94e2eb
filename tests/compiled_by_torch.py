"""What runs the regions of a compiled step in place of inductor's kernels: torch's own operators, in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lowtide.ir.bodies import Region, is_by_inductor
from lowtide.ir.graph import Graph
from lowtide.lower.python import lower
from lowtide.plan.contents import Decision
from lowtide.runtime.program import Program


def runners(graph: Graph) -> Mapping[str, Callable[..., Any]]:
    regions = [Region.of(node) for node in graph.nodes if is_by_inductor(node)]
    return {region.node.results[0].name: _by_torch(region.body) for region in regions}


def _by_torch(body: Graph) -> Callable[..., Any]:
    program = Program(lower(Decision.in_order(body)), gradients=False)
    return lambda *given: program(list(given))
