"""Splits and candidates of graphs, as tests ask for them: along one dimension of one tensor, in program order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from lowtide.cost.memory import counted_storages, order_problem, simulate
from lowtide.ir.graph import Graph, Node, Storage, Value
from lowtide.ir.operators.axes import Axis, cut_by
from lowtide.ir.operators.nodes import axes_of, is_view
from lowtide.rewrite.base import Rewritten
from lowtide.split.dimensions import DimensionGraph
from lowtide.split.parts import Split, refuse
from lowtide.split.proposals import SplitCandidate, candidates_of
from lowtide.split.rewrite import looped, with_loops
from lowtide.split.sets import Regions


def along(nodes: Sequence[Node], value: Value, dim: int) -> Split:
    """The split of all these nodes, in program order, along the dimension that runs through `value` at `dim`.

    Raises CheckError naming a node that the dimension does not run through.
    """
    touching: defaultdict[Value, list[Node]] = defaultdict(list)
    for node in nodes:
        for each in dict.fromkeys((*node.inputs, *node.results, *(before for before, _ in node.writes))):
            touching[each].append(node)
    dims, chosen, pending = {value: dim}, dict[Node, Axis](), [value]
    while pending:
        reached = pending.pop()
        for node in touching[reached]:
            if node not in chosen and (axis := _axis(node, reached, dims[reached])) is not None:
                chosen[node] = axis
                for other, at in cut_by(node, axis):
                    if other not in dims:
                        dims[other] = at
                        pending.append(other)
    for node in nodes:
        if node not in chosen and not is_view(node):
            refuse(node, f"the dimension {dim} of {value.name} to run through it")
    return Split({node: chosen.get(node) for node in nodes})


def _axis(node: Node, value: Value, dim: int) -> Axis | None:
    """The axis of a node that has a value's dimension."""
    return next((axis for axis in axes_of(node) if (value, dim) in set(cut_by(node, axis))), None)


def split(graph: Graph, wanted: Split, parts: int) -> Rewritten:
    """The graph with a loop of so many parts, of which the last may be smaller; fewer where there are fewer units.

    Raises CheckError saying what is in the way, for a set that cannot be split so.
    """
    return with_loops(graph, [looped(graph, wanted, parts)])


def hot_bytes(graph: Graph, order: Sequence[int] | None = None, workspace_bytes: Sequence[int] | None = None) -> dict[Storage, int]:
    """The storages that live where an order peaks first, resident ones aside, and their bytes. Without an order, in program order."""
    problem = order_problem(graph, workspace_bytes)
    played = simulate(problem, np.arange(len(graph.nodes)) if order is None else order)
    start, end = played.lifetimes
    alive = (start <= played.peak_step) & (played.peak_step < end)
    return {storage: int(problem.tensor_bytes[index]) for index, storage in enumerate(counted_storages(graph)) if alive[index]}


def candidates(graph: Graph, order: Sequence[int] | None = None, *, levels: int = 4, most: int = 512) -> tuple[SplitCandidate, ...]:
    """Sets to split where the graph peaks in an order, or in program order; the largest scores first, at most so many are tried.

    Raises CheckError for symbolic sizes, or an order that is none.
    """
    return candidates_of(Regions(DimensionGraph.of(graph)), hot_bytes(graph, order), levels=levels, most=most)
