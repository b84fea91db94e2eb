"""Memory over the steps of any order of a graph."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.cost.memory import MemoryProfile, order_problem, profile_of, simulate
from lowtide.ir.graph import Graph


def memory_profile(
    graph: Graph, order: Sequence[int], workspace_bytes: Sequence[int] | None = None, *, round_to: int = 1, eager: bool = False
) -> MemoryProfile:
    """Memory over the steps of `order`, with every storage's lifetime; arguments and errors as for `order_problem` and `simulate`."""
    problem = order_problem(graph, workspace_bytes, round_to=round_to, eager=eager)
    return profile_of(graph, problem, order, simulate(problem, order), round_to=round_to)
