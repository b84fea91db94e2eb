"""Graphs that compute what the captured one does up to rounding, some of their sets part by part: those that are worth a search.

Where eager's numbers are asked for none is taken; whether it would help to split the loss is told all the same. The logits of a language
model are as large as its vocabulary is, and there are several such tensors at once. Run in parts they need little, at hardly any cost in
time; but sums are rounded otherwise, so that it is done with `exact=False` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowtide.cost.device import Device
from lowtide.errors import CheckError
from lowtide.ir.bodies import Loop, is_loop
from lowtide.ir.graph import Graph, Node, Storage, Value
from lowtide.rewrite.losses import LOSSES, add_into_sums, make_anew, sum_losses
from lowtide.rewrite.rewritings import Rewriting
from lowtide.split.dimensions import DimensionGraph
from lowtide.split.judge import Judge, Prices
from lowtide.split.proposals import SplitCandidate, candidates_of
from lowtide.split.rewrite import Loops
from lowtide.split.search import FissionSearch, Root, SearchWidth

_PARTS = 16


@dataclass(frozen=True, eq=False)
class LossInParts:
    """A graph whose loss runs in parts."""

    graph: Graph
    over: str  # "tokens"


def loss_in_parts(graph: Graph) -> LossInParts | None:
    """The graph with its loss split, together with what makes its scores and takes their gradient; None where there is none to split."""
    if any(is_loop(node) for node in graph.nodes):
        return None
    base = prepared(graph)
    losses = {place: node for place, node in enumerate(base.nodes) if node.op in LOSSES}
    if not losses:
        return None
    try:
        loops = Loops(base)
        hot = {storage: nbytes for node in losses.values() for storage, nbytes in _like_scores(loops.regions.dimensions, node).items()}
        sets = [each for each in candidates_of(loops.regions, hot) if not losses.keys().isdisjoint(each.region.axes)]
        chosen = max(sets, key=_worth, default=None)
        if chosen is None or chosen.saved_bytes <= 0:
            return None
        graph_in_parts = loops.graph_of({chosen.region: min(_PARTS, chosen.region.units)})
    except CheckError:  # symbolic sizes, or a set that cannot run in parts
        return None
    return LossInParts(graph_in_parts, next(Loop.of(node).body.dimensions[0].name for node in graph_in_parts.nodes if is_loop(node)))


def _worth(candidate: SplitCandidate) -> tuple[int, int, int]:
    """What it spares, then that nothing as large leaves it whole, with as few operators as that takes."""
    least = candidate.saved_bytes
    whole = {value.storage: value.storage.nbytes for value in candidate.region.written}
    left_bytes = sum(nbytes for nbytes in whole.values() if isinstance(nbytes, int) and nbytes >= least)
    return candidate.saved_bytes, -left_bytes, -len(candidate.region.axes)


def _like_scores(dimensions: DimensionGraph, loss: Node) -> dict[Storage, int]:
    """What is made over classes and as large as the scores."""
    scores = loss.args[0]
    assert isinstance(scores, Value)
    nbytes = scores.storage.nbytes
    classes = dimensions.component(scores, 1 if len(scores.shape) > 1 else 0) if scores.shape else -1
    counts: dict[Storage, int] = {}
    for value in (value for node in dimensions.graph.nodes for value in node.results):
        over_classes = any(dimensions.component(value, dim) == classes for dim in range(len(value.shape)))
        if over_classes and value.storage.nbytes == nbytes and isinstance(nbytes, int) and not value.storage.kind.caller_owned:
            counts[value.storage] = nbytes
    return counts


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
    return [each for each in exact if not each.applied_rules][-1:] + [each for each in exact if each.applied_rules][:1] + rounded[-1:]


def found_graphs(given: Sequence[MeasuredGraph], rates: Device, granule_bytes: int, links: Device | None) -> list[FoundGraph]:
    """Those of the given graphs, and of what splits make of them, that are worth a search; the given ones compute the same.

    Times of parts are reckoned by `rates`. Tensors may be swapped over `links`.
    """
    roots = [
        Root(each.graph, Prices(each.graph, each.node_us, each.workspace_bytes, rates), Loops(each.graph) if each.split else None)
        for each in given
    ]
    search = FissionSearch(roots, Judge(granule_bytes, links), SearchWidth())
    search.run()
    return [FoundGraph(state.judged.graph, state.root) for state in search.chosen()]
