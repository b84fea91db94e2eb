"""One search over graphs: which sets run in parts, and in how many (MAGIS, section 6.2, Algorithm 3).

A state is a graph: one that computes what the captured one does, or what splits make of that. Few evictions tell what it takes within each
of some limits (`judge`). A state that is best within some limit is on the frontier, and is gone on from: what stands where its sequences
are highest is the heat, whose dominators give new sets to split (`split.proposals`), and every other choice of its splits is a neighbour.
Which neighbour is judged next is told by an estimate: its parent's times, within as much more memory as it spares, and what its loops cost.
States are known by what they split, so that none is judged twice.

Nothing here knows a limit that is asked for, reads a clock or measures: the same graph at the same prices always gives the same graphs.
Effort is counted in states. Planning searches what is chosen in earnest, and compares.

Sets that repeated blocks have alike (`groups_of`) are split together, at the price of one.

Graphs that compute what the captured one does up to rounding are handed on where they are worth a search. Where eager's numbers are asked
for none is taken; whether it would help to split the loss is told all the same. The logits of a language model are as large as its
vocabulary is, and there are several such tensors at once. Run in parts they need little, at hardly any cost in time; but sums are rounded
otherwise, so that it is done with `exact=False` alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtide.cost.device import Device
from lowtide.errors import CheckError
from lowtide.ir.bodies import Loop, is_loop
from lowtide.ir.graph import Graph, Node, Storage, Value
from lowtide.rewrite.losses import LOSSES, add_into_sums, make_anew, sum_losses
from lowtide.rewrite.rewritings import Rewriting
from lowtide.split.dimensions import DimensionGraph
from lowtide.split.judge import Judge, JudgedGraph, Prices
from lowtide.split.proposals import SplitCandidate, candidates_of
from lowtide.split.rewrite import Loops
from lowtide.split.sets import SplitSet

_LOSS_PARTS = 16


@dataclass(frozen=True, eq=False)
class AlikeRegions:
    """Regions that lie apart, run the same operators on the same shapes, and are cut alike."""

    regions: tuple[SplitSet, ...]
    saved_bytes: int  # at the peak, by two parts of each

    @property
    def bits(self) -> int:
        bits = 0
        for region in self.regions:
            bits |= region.bits
        return bits


def groups_of(graph: Graph, candidates: Sequence[SplitCandidate]) -> list[AlikeRegions]:
    """Candidates put together, the largest savings first."""
    alike: defaultdict[tuple[Hashable, ...], list[SplitCandidate]] = defaultdict(list)
    for each in candidates:
        alike[_look(graph, each.region)].append(each)
    groups = [_apart(members) for members in alike.values()]
    return sorted(groups, key=lambda group: (-group.saved_bytes, group.bits))


def _apart(members: Iterable[SplitCandidate]) -> AlikeRegions:
    """As many as lie apart, those first that come first."""
    taken, chosen = 0, []
    for each in sorted(members, key=lambda each: each.region.bits):
        if not taken & each.region.bits:
            taken |= each.region.bits
            chosen.append(each)
    return AlikeRegions(tuple(each.region for each in chosen), sum(each.saved_bytes for each in chosen))


def _look(graph: Graph, region: SplitSet) -> tuple[Hashable, ...]:
    nodes = ((graph.nodes[place], axis) for place, axis in region.axes.items())
    return region.units, *((node.op, axis.extent, axis.sliced, *(value.shape for value in node.results)) for node, axis in nodes)


_PARTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_SAME = 1 + 1e-4  # times this near are as good as one another
_WORTH = 1e-3  # of the time, over all limits: what a neighbour has to promise
_KEPT, _DOUBT = 0.25, 0.5  # of what was hoped for: from there on a set is not doubted; else what it promises counts so much less
_MOST = 4.0  # of the time: what counts for more within a limit, and where nothing fits

Times: TypeAlias = "NDArray[np.float64]"  # [limits]
Key: TypeAlias = "tuple[int, frozenset[tuple[int, int, int]]]"
Splits: TypeAlias = "frozenset[tuple[AlikeRegions, int]]"  # sets that are alike, and into how many parts each of them is cut


@dataclass(frozen=True)
class SearchWidth:
    """How far to look for what to split.

    states: graphs that are judged. nodes: these have together, so that large graphs do not take longer. levels: of the scores of sets
    (the paper's L). sets: that are tried at a peak. peaks: states at whose peaks sets are looked for. chosen: graphs in the end, but
    for the fastest.
    """

    states: int = 160
    nodes: int = 120_000
    levels: int = 4
    sets: int = 8
    peaks: int = 8
    chosen: int = 8


@dataclass(frozen=True, eq=False)
class Root:
    """A graph that nothing is split of yet, and at what prices."""

    graph: Graph
    prices: Prices
    loops: Loops | None = None  # None for one that is not to be split


@dataclass(frozen=True, eq=False)
class SplitState:
    """A graph, of which sets may run in parts."""

    root: int
    splits: Splits
    judged: JudgedGraph

    @property
    def us(self) -> Times:
        return self.judged.us


@dataclass(frozen=True, eq=False)
class _Neighbour:
    """Splits that nobody has judged yet, and what they may come to."""

    splits: Splits
    parent: SplitState
    us: Times
    due: tuple[tuple[AlikeRegions, int], ...]  # new sets whose loops are not priced yet: as if they took no longer than their operators


@dataclass(eq=False)
class FissionSearch:
    """The states that were found of some graphs that compute the same. The first of them sets the limits."""

    roots: Sequence[Root]
    judge: Judge
    outer: SearchWidth = SearchWidth()
    states: list[SplitState] = field(default_factory=list)
    _seen: set[Key] = field(default_factory=set)
    _open: list[_Neighbour] = field(default_factory=list)
    _groups: dict[tuple[int, tuple[tuple[int, int], ...]], AlikeRegions] = field(default_factory=dict)
    _trust: dict[AlikeRegions, float] = field(default_factory=dict)
    peaks: int = 0

    def run(self) -> None:
        """Judges the neighbours that promise the most, until none does or the effort is spent."""
        for root in range(len(self.roots)):
            self._judged(root, frozenset(), None)
        due = list(self.states)
        while not self._over():
            self._open += [neighbour for state in due for neighbour in self._neighbours(state)]
            chosen, before = self._most_promising(), self.best
            if chosen is None:
                return
            judged = self._judged(chosen.parent.root, chosen.splits, chosen.parent)
            self._learn(chosen, before)
            due = [judged] if judged is not None and self._is_best(judged) else []

    def _learn(self, neighbour: _Neighbour, before: Times) -> None:
        """Trust new sets less that did not do what was hoped of them."""
        hoped, came = _gain(before, neighbour.us), _gain(before, self.best)
        for group, _ in neighbour.splits - neighbour.parent.splits:
            self._trust[group] = self._trust.get(group, 1.0) * (1.0 if came > _KEPT * hoped else _DOUBT)

    def _is_best(self, state: SplitState) -> bool:
        """Whether a state is on the frontier: best within some limit."""
        best = self.best
        return bool((state.us <= best * _SAME)[np.isfinite(best)].any())

    def chosen(self) -> list[SplitState]:
        """Those that together lose least against all, over all limits, the one that gains most first; then the fastest of all."""
        best, states = self.best, list[SplitState]()
        regret = np.full(len(best), 2 * _MOST)
        while len(states) < self.outer.chosen:
            losses = [float(np.minimum(regret, _regret(each, best)).sum()) for each in self.states]
            at = int(np.argmin(losses))
            if losses[at] >= regret.sum() - _WORTH:
                break
            states.append(self.states[at])
            regret = np.minimum(regret, _regret(self.states[at], best))
        fastest = min(self.states, key=lambda each: float(each.us[0]))  # what parts cost is told beside it, and a generous limit has it
        if all(each.us[0] > fastest.us[0] for each in states):
            states.append(fastest)
        return states

    @property
    def best(self) -> Times:
        best_us: Times = np.min([state.us for state in self.states], axis=0)
        return best_us

    def _over(self) -> bool:
        nodes = sum(len(state.judged.graph.nodes) for state in self.states)
        return len(self._seen) >= self.outer.states or nodes >= self.outer.nodes

    def _judged(self, which: int, splits: Splits, parent: SplitState | None) -> SplitState | None:
        root = self.roots[which]
        self._seen.add(_key(which, splits))
        try:
            parts = {region: count for group, count in splits for region in group.regions}
            graph = root.graph if root.loops is None else root.loops.graph_of(parts)
        except CheckError:
            return None
        state = SplitState(which, splits, self.judge.of(graph, root.prices, parent.judged if parent is not None else None))
        self.states.append(state)
        return state

    def _most_promising(self) -> _Neighbour | None:
        """The neighbour that may gain the most over what is known. Its loops are made and priced when it is the first to come."""
        best = self.best
        self._open = [each for each in self._open if _key(each.parent.root, each.splits) not in self._seen]
        gains = [_gain(best, each.us) * self._trusted(each) for each in self._open]
        while gains and max(gains) >= _WORTH:
            first = int(np.argmax(gains))
            if not self._open[first].due:
                return self._open.pop(first)
            priced = self._priced(self._open[first])
            if priced is None:
                del self._open[first], gains[first]
            else:
                self._open[first], gains[first] = priced, _gain(best, priced.us) * self._trusted(priced)
        return None

    def _priced(self, neighbour: _Neighbour) -> _Neighbour | None:
        """With what its new loops take; None where one of its sets cannot run in parts."""
        root = self.roots[neighbour.parent.root]
        assert root.loops is not None, "it has neighbours"
        if any(root.loops.looped(region) is None for group, _ in neighbour.due for region in group.regions[:1]):
            return None
        extra_us = sum(_extra_us(each, root.loops, root.prices) for each in neighbour.due)
        return replace(neighbour, us=neighbour.us + extra_us, due=())

    def _trusted(self, neighbour: _Neighbour) -> float:
        return min((self._trust.get(group, 1.0) for group, _ in neighbour.splits - neighbour.parent.splits), default=1.0)

    def _neighbours(self, state: SplitState) -> Iterator[_Neighbour]:
        """What is one mutation away: other numbers of parts, one set less, and sets around what stands where the state peaks."""
        loops = self.roots[state.root].loops
        if loops is None:
            return
        for group, parts in sorted(state.splits, key=lambda each: (-each[0].saved_bytes, each[0].bits)):
            for count in (0, *_PARTS):
                if count != parts and count <= group.regions[0].units:
                    yield self._neighbour(state, loops, {group: parts}, {group: count} if count else {})
        for group in self._proposed(state, loops):
            within = {other: parts for other, parts in state.splits if other.bits & group.bits}
            if all(other.bits & ~group.bits == 0 for other in within):  # else some would cross
                for parts in (each for each in _PARTS if each <= group.regions[0].units):
                    yield self._neighbour(state, loops, within, {group: parts})

    def _neighbour(self, state: SplitState, loops: Loops, without: dict[AlikeRegions, int], instead: dict[AlikeRegions, int]) -> _Neighbour:
        splits = (state.splits - without.items()) | instead.items()
        spared = sum(map(_spared_bytes, instead.items())) - sum(map(_spared_bytes, without.items()))
        extra_us = -sum(_extra_us(each, loops, self.roots[state.root].prices) for each in without.items())
        limits = self.judge.limits
        there = np.isfinite(state.us)
        moved = np.interp(limits + spared, limits[there][::-1], state.us[there][::-1], left=np.inf)
        return _Neighbour(frozenset(splits), state, np.asarray(moved + extra_us, np.float64), tuple(instead.items()))

    def _proposed(self, state: SplitState, loops: Loops) -> list[AlikeRegions]:
        """Sets around what stands where the state's sequences are highest: without a limit, within the least, and between."""
        if self.peaks >= self.outer.peaks:
            return []
        self.peaks += 1
        proposals: dict[AlikeRegions, None] = {}
        limits = sorted(state.judged.sequences)
        for limit in dict.fromkeys((limits[0], limits[-1], limits[len(limits) // 2])):
            candidates = candidates_of(loops.regions, state.judged.standing(limit), levels=self.outer.levels, most=16 * self.outer.sets)
            groups = [each for each in groups_of(loops.graph, candidates) if each.saved_bytes > 0][: self.outer.sets]
            proposals |= dict.fromkeys(self._known(state.root, each) for each in groups)
        return list(proposals)

    def _known(self, root: int, group: AlikeRegions) -> AlikeRegions:
        return self._groups.setdefault((root, tuple((each.component, each.bits) for each in group.regions)), group)


def _key(root: int, splits: Splits) -> Key:
    return root, frozenset((region.component, region.bits, parts) for group, parts in splits for region in group.regions)


def _extra_us(split: tuple[AlikeRegions, int], loops: Loops, prices: Prices) -> float:
    """What it costs to cut alike sets into so many parts: as often as the first of them."""
    group, parts = split
    loop = loops.divided(group.regions[0], parts)
    return len(group.regions) * prices.extra_us(loop.nodes, loop.loop)


def _spared_bytes(split: tuple[AlikeRegions, int]) -> float:
    """What parts spare of what two parts would: nearly twice that, where they are many."""
    group, parts = split
    return 2 * group.saved_bytes * (1 - 1 / parts)


def _gain(best: Times, us: Times) -> float:
    """What times gain over the best, as shares of the least time, over all limits."""
    known = np.minimum(best, float(best[0]) * (1 + _MOST))
    return float((known - np.minimum(us, known)).sum() / best[0])


def _regret(state: SplitState, best: Times) -> Times:
    """[limits] what a state takes longer than the best, as a share of that; 0 where nothing is known to fit."""
    with np.errstate(invalid="ignore"):
        regret: Times = np.where(np.isfinite(best), np.minimum(_MOST, state.us / best - 1), 0.0)
    return regret


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
        graph_in_parts = loops.graph_of({chosen.region: min(_LOSS_PARTS, chosen.region.units)})
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
