"""Which sets are worth a try: Algorithm 1 of MAGIS (section 4.3) over the components of the dimension graph.

For each component and each phase, the nodes that it runs through make a graph of their own; its dominators are scored by what stands at
the peak. Scores are put into levels, and of each level the deepest nodes give a set each: what they dominate, as far as it is legal
(`sets`), around the largest value at the peak that is made within.

Otherwise than the paper: below its L equal intervals of the score come halvings of the lowest, since a block's share of a deep network's
heat is small; phases stand beside the whole step, for which what an earlier phase left is given as weights are: the backward half of a
block is dominated by nothing but the entry of the forward half otherwise; all of a component is a candidate, too; and of each set
also what comes before the last reader of its heat, and what can be cut as fine as the value at its heart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.ir.graph import Graph, Kind, Storage, Value
from lowtide.split.sets import Borders, Dominators, Grown, Heat, Regions, SplitSet

_HALVINGS = 8  # below the lowest interval
_MOST_VISITS = 1_000_000  # of nodes, for all sets together but the first: each visits those between its ends, four times


@dataclass(frozen=True, eq=False)
class SplitCandidate:
    region: SplitSet
    saved_bytes: int  # at the peak, by two parts: half of what it makes and nobody else reads


@dataclass(frozen=True, eq=False)
class _Phased:
    """The nodes of one component in one phase, as a graph of their own: node i + 1 of the tree is the one at places[i]."""

    places: Sequence[int]
    tree: Dominators
    heat: Heat


def candidates_of(regions: Regions, hot: Mapping[Storage, int], *, levels: int = 4, most: int = 512) -> tuple[SplitCandidate, ...]:
    """Sets to split where so many bytes of these storages stand at a peak. Raises CheckError for symbolic sizes."""
    candidates: dict[tuple[int, int], SplitCandidate] = {}
    visits = 0
    for _, anchor, dim, places in sorted(_wanted(regions, hot, levels), key=lambda each: (-each[0], len(each[3]), each[3][:1]))[:most]:
        cost = 4 * (places[-1] - places[0] + 1)
        if visits + cost > _MOST_VISITS and visits:
            continue
        visits += cost
        for fine in (False, True):
            region = regions.around(anchor, dim, places, fine=fine)
            if region is not None and (region.component, region.bits) not in candidates:
                candidates[region.component, region.bits] = SplitCandidate(region, _saved_bytes(regions, region, hot))
    return tuple(candidates.values())


def _wanted(regions: Regions, hot: Mapping[Storage, int], levels: int) -> Iterator[tuple[float, Value, int, tuple[int, ...]]]:
    """The score of each dominated set, a value to cut and where, and the places of the set's nodes."""
    values, bounds = _made(regions, hot), _bounds(regions.graph)
    for component, places in enumerate(regions.dimensions.nodes_by_component()):
        for phase in _phases(bounds, places) if any(place in values for place in places) else ():
            phased = _phased(regions, component, phase, values, hot)
            for node, dominated in _dominated(phased, _chosen(phased, levels)):
                for wanted in dict.fromkeys((dominated, _until_read(regions, dominated, values))):
                    for value, dim in _anchors(regions, component, wanted, values):
                        yield phased.heat.score[node], value, dim, wanted


def _until_read(regions: Regions, places: tuple[int, ...], values: Mapping[int, list[Value]]) -> tuple[int, ...]:
    """Those up to the last that reads what is made among them and stands at the peak: behind it parts have nothing to save."""
    hot = {value.storage for place in places for value in values.get(place, ())}
    nodes = regions.graph.nodes
    last = next((at for at in range(len(places), 0, -1) if any(value.storage in hot for value in nodes[places[at - 1]].inputs)), None)
    return places[:last]


def _made(regions: Regions, hot: Mapping[Storage, int]) -> dict[int, list[Value]]:
    """By place, the values on hot storages that a node makes anew."""
    by_maker: dict[int, list[Value]] = {}
    for place, node in enumerate(regions.graph.nodes):
        given = {value.storage for value in node.inputs}
        values = [value for value in node.outputs if value is not None and value.storage in hot and value.storage not in given]
        if values:
            by_maker[place] = values
    return by_maker


def _bounds(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Where the forward pass, the backward pass and the update begin and end; nothing where there are no gradients."""
    gradients = [place for place, node in enumerate(graph.nodes) if any(value.storage.kind is Kind.GRADIENT for value in node.results)]
    if not gradients:
        return ()
    first, last = gradients[0], gradients[-1] + 1
    return (0, first), (first, last), (last, len(graph.nodes))


def _phases(bounds: Sequence[tuple[int, int]], places: Sequence[int]) -> Iterator[Sequence[int]]:
    """These nodes of the whole step, then of each of its phases, where there are several."""
    yield places
    for begin, end in bounds:
        phase = [place for place in places if begin <= place < end]
        if phase and len(phase) < len(places):
            yield phase


def _phased(
    regions: Regions, component: int, places: Sequence[int], values: Mapping[int, list[Value]], hot: Mapping[Storage, int]
) -> _Phased:
    known = _grown(regions, component, places)
    amounts = [0, *(sum(hot[value.storage] for value in values.get(place, ())) for place in places)]
    cold = np.array([0 if storage in hot else nbytes for storage, nbytes in known.given], np.int64)
    return _Phased(places, known.tree, Heat.of(known.tree, amounts, known.borders.of(known.tree, cold)))


def _grown(regions: Regions, component: int, places: Sequence[int]) -> Grown:
    """The tree of what one part runs through, and what else that is given."""
    key = component, places[0], len(places)
    if key not in regions.trees:
        regions.trees[key] = _grow(regions, component, places)
    return regions.trees[key]


def _grow(regions: Regions, component: int, places: Sequence[int]) -> Grown:
    tree, number = Dominators(), {place: index + 1 for index, place in enumerate(places)}
    touched: dict[Value, list[int]] = {}  # by what nodes read, who does
    for place in places:
        before = set[int]()
        cut = {value for each in regions.cuts[place].get(component, ()) for value in each.pairs}
        for value in regions.graph.nodes[place].inputs:
            maker = number.get(regions.makers.get(value, -1))
            if maker is not None and maker < number[place] and value in cut:
                before.add(maker)
            touched.setdefault(value, []).append(number[place])
        tree.add(sorted(before))
    given = [value for value in touched if not value.storage.kind.caller_owned and isinstance(value.storage.nbytes, int)]
    borders = Borders(tree, [(number.get(regions.makers.get(value, -1), -1), *touched[value]) for value in given])
    return Grown(tree, borders, [(value.storage, _nbytes(value)) for value in given])


def _chosen(phased: _Phased, levels: int) -> list[int]:
    """The deepest nodes of each level of scores, and the start: that of all nodes."""
    score = phased.heat.score
    highest = max(score)
    if highest <= 0:
        return []
    level_of = [_level(each / highest, levels) for each in score]
    below: list[set[int]] = [set() for _ in score]  # the levels among what a node dominates
    chosen = []
    for node in range(len(score) - 1, 0, -1):
        level = level_of[node]
        if level is not None and level not in below[node]:
            chosen.append(node)
        below[phased.tree.parent[node]] |= below[node] if level is None else below[node] | {level}
        below[node] = set()
    return [*chosen, 0]


def _level(share: float, levels: int) -> int | None:
    """The interval of a share of the highest score: L for the highest, 1 for the lowest of L, then halvings; None for what is too low."""
    if share * levels >= 1:
        return int(share * levels)
    return next((-halving for halving in range(_HALVINGS) if share * levels >= 2.0 ** -(halving + 1)), None) if share > 0 else None


def _dominated(phased: _Phased, nodes: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Of each of these nodes the places of what it dominates, without itself."""
    spans, order = phased.tree.dominated(), [0] * len(phased.tree.parent)
    for node, met in enumerate(phased.tree.first_met()):
        order[met] = node
    for node in nodes:
        first, end = spans[node]
        yield node, tuple(phased.places[other - 1] for other in sorted(order[first:end]))


def _anchors(
    regions: Regions, component: int, places: Sequence[int], values_by_maker: Mapping[int, list[Value]]
) -> Iterator[tuple[Value, int]]:
    """The largest hot value that is made at one of these places and has the dimension, and where it has it."""
    values = [value for place in places for value in values_by_maker.get(place, ())]
    for value in sorted(values, key=lambda each: -_nbytes(each)):
        dims = [dim for dim, extent in enumerate(value.shape) if extent != 1 and regions.dimensions.component(value, dim) == component]
        if dims:
            yield from ((value, dim) for dim in dims)
            return


def _nbytes(value: Value) -> int:
    return value.storage.nbytes if isinstance(value.storage.nbytes, int) else 0


def _saved_bytes(regions: Regions, region: SplitSet, hot: Mapping[Storage, int]) -> int:
    """What two parts save of what the region makes at the peak: what leaves the region stays whole, or lies where what it is given lay."""
    leaving = {value.storage for value in (*region.written, *region.accumulated)} - _laid_over(regions, region)
    nodes = (regions.graph.nodes[place] for place in region.axes)
    storages = dict.fromkeys(value.storage for node in nodes for value in node.results)
    return sum(hot[storage] for storage in storages if storage in hot and storage not in leaving) // 2


def _laid_over(regions: Regions, region: SplitSet) -> set[Storage]:
    """The largest storage that parts may leave in the place of what they are given, as far as that is read by nobody later."""
    read_last = [value for value in region.sliced if value in regions.makers and regions.readers[value][-1] in region.axes]
    ends = {(region.sliced[value], value.dtype, value.shape, value.stride, value.storage.nbytes) for value in read_last}
    able = [each for each, dim in region.written.items() if (dim, each.dtype, each.shape, each.stride, each.storage.nbytes) in ends]
    return {max(able, key=_nbytes).storage} if able else set()
