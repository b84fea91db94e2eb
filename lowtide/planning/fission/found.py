"""Graphs that compute what the captured one does up to rounding, some of their sets part by part: those that are worth a search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowtide.cost.device import Device
from lowtide.ir.graph import Graph
from lowtide.planning.algebra import Rewriting
from lowtide.planning.fission.judge import Judge
from lowtide.planning.fission.loops import Loops
from lowtide.planning.fission.prices import Prices
from lowtide.planning.fission.search import FissionSearch, Outer, Root
from lowtide.rewrite.into_sums import add_into_sums
from lowtide.rewrite.losses import sum_losses
from lowtide.rewrite.made_anew import make_anew


@dataclass(frozen=True, eq=False)
class MeasuredGraph:
    """A graph, and what its nodes take and need."""

    graph: Graph
    node_us: Sequence[float]
    workspace_bytes: Sequence[int]
    split: bool  # whether sets of it may run in parts


@dataclass(frozen=True, eq=False)
class FoundGraph:
    """A graph that is worth a search, and which of the given ones it was made of."""

    graph: Graph
    of: int


def prepared(graph: Graph) -> Graph:
    """The graph with what sets that run in parts would stop at written otherwise: mean losses, gradients that are added up, looks."""
    for rewrite in (make_anew, sum_losses, add_into_sums):
        done = rewrite(graph)
        graph = done.graph if done.forward else graph
    return graph


def worth_parting(rewritings: Iterable[Rewriting]) -> list[Rewriting]:
    """Of equal graphs those that are split: the last one, that by exact rules wherever they fit, and that by all rules in the least time.

    Rules that spare time spare it in every part, too; without them no plan in parts would come near the time of those that have them.
    """
    every = list(rewritings)
    exact, rounded = [each for each in every if each.exact], [each for each in every if not each.exact]
    return [each for each in exact if not each.deeds][-1:] + [each for each in exact if each.deeds][:1] + rounded[-1:]


def found_graphs(
    given: Sequence[MeasuredGraph], rates: Device, granule_bytes: int, links: Device | None, outer: Outer | None = None
) -> list[FoundGraph]:
    """Those of the given graphs, and of what splits make of them, that are worth a search; the given ones compute the same.

    Times of parts are reckoned by `rates`. Tensors may be swapped over `links`.
    """
    roots = [
        Root(each.graph, Prices(each.graph, each.node_us, each.workspace_bytes, rates), Loops(each.graph) if each.split else None)
        for each in given
    ]
    search = FissionSearch(roots, Judge(granule_bytes, links), outer or Outer())
    search.run()
    return [FoundGraph(state.judged.graph, state.root) for state in search.chosen()]
