"""How good a graph is, told in few evictions: the least time that a first guess finds within each of some limits.

The limits are the same for all graphs that are compared, in even steps from the peak of the program as it stands down to what is resident.
What its parent did best within a limit is a graph's first guess there, what it did best itself one step above is the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from lowtide.cost.device import Device
from lowtide.cost.memory import counted_storages, order_problem
from lowtide.ir.graph import Graph, Storage
from lowtide.problems.order import Ints, Rows
from lowtide.remat.cost import cost_of
from lowtide.remat.entries import EntryKind
from lowtide.remat.evict.eviction import ScoreWeights, evict
from lowtide.remat.problem import RematProblem
from lowtide.remat.pruning import prompt
from lowtide.split.prices import Prices

_LEVELS = 16
_RULES = (ScoreWeights(1.0, 1.0, 0.4), ScoreWeights(1.0, 0.5, 1.0), ScoreWeights(1.6, 1.0, 0.4), ScoreWeights(0.5, 0.5, 0.4))
_STORES = ((0.05, 0.2), (0.14, 0.3))  # store_above, store_cap
_LOADS = (0.02, 1.2)  # load_weight, lead
_TRIED = 3  # rules at a limit


@dataclass(frozen=True, eq=False)
class JudgedGraph:
    """A graph, and what it takes within limits."""

    graph: Graph
    problem: RematProblem
    us: NDArray[np.float64]  # [limits] the least time; inf where nothing was found
    rules: tuple[ScoreWeights, ...]  # [limits] by which that was found
    sequences: dict[int, Ints]  # by limit

    def standing(self, limit: int) -> dict[Storage, int]:
        """What stands where a limit's sequence is highest, and its bytes."""
        base, sequence = self.problem.problem, self.sequences[limit]
        place = int(cost_of(self.problem, sequence).footprint_bytes.argmax())
        alive = _alive(self.problem, sequence, place)
        return {storage: int(base.tensor_bytes[index]) for index, storage in enumerate(counted_storages(self.graph)) if index in alive}


class Judge:
    """Compares graphs that compute the same on one machine."""

    def __init__(self, granule_bytes: int, links: Device | None) -> None:
        self._granule_bytes, self._links = granule_bytes, links
        self._limits: NDArray[np.int64] | None = None

    @property
    def limits(self) -> NDArray[np.int64]:
        """The highest first."""
        assert self._limits is not None, "a graph was judged"
        return self._limits

    def of(self, graph: Graph, prices: Prices, parent: JudgedGraph | None = None) -> JudgedGraph:
        """What a graph takes; the first one of all sets the limits."""
        known = order_problem(graph, prices.workspace_bytes(graph), round_to=self._granule_bytes)
        problem = RematProblem.of(graph, prices.us(graph), round_to=self._granule_bytes, swap=self._links, known=known)
        order = prompt(problem, problem.sequence_of(range(len(graph.nodes))))
        limits = self._limits_for(problem, order)
        us, rules, sequences = np.full(len(limits), np.inf), [_RULES[0]] * len(limits), dict[int, Ints]()
        for at, limit in enumerate(limits.tolist()):
            for turn, rule in enumerate(self._guesses(at, rules, parent)):
                if turn == 0 and _fits(problem, order, limit):
                    us[at], sequences[at] = cost_of(problem, order).time_us, order
                    break
                evicted = evict(problem, order, limit, rule)
                if evicted is not None and (took := cost_of(problem, evicted.sequence).time_us) < us[at]:
                    us[at], rules[at], sequences[at] = took, rule, evicted.sequence
            if at and not np.isfinite(us[at - 1 : at + 1]).any():
                break
        return JudgedGraph(graph, problem, np.minimum.accumulate(us[::-1])[::-1], tuple(rules), sequences)

    def _limits_for(self, problem: RematProblem, order: Ints) -> NDArray[np.int64]:
        if self._limits is None:
            top, floor = cost_of(problem, order).peak_bytes, problem.problem.resident_bytes
            self._limits = np.array([top - (top - floor) * step // _LEVELS for step in range(_LEVELS)], np.int64)
        return self._limits

    def _guesses(self, at: int, rules: list[ScoreWeights], parent: JudgedGraph | None) -> list[ScoreWeights]:
        """Rules to try at a limit, the likeliest first."""
        likely = [*([parent.rules[at]] if parent is not None else []), *([rules[at - 1]] if at else [])]
        others = list(self._rules())
        turned = others[at % len(others) :] + others[: at % len(others)]
        return list(dict.fromkeys([*likely, *turned]))[:_TRIED]

    def _rules(self) -> Iterator[ScoreWeights]:
        if self._links is None:
            return iter(_RULES)
        weight, lead = _LOADS
        swapping = (
            replace(rule, store_above=above, store_cap=cap, load_weight=weight, lead=lead)
            for rule, (above, cap) in product(_RULES, _STORES)
        )
        return iter([*swapping, _RULES[0]])


def _fits(problem: RematProblem, order: Ints, limit: int) -> bool:
    return cost_of(problem, order).peak_bytes <= limit


def _alive(problem: RematProblem, sequence: Ints, place: int) -> set[int]:
    """The tensors of which a copy is there while an entry runs."""
    base, codes = problem.problem, problem.codes
    alive, anew = set[int](), set[int]()  # what is read from there on; of what a later entry makes another copy
    for at, entry in enumerate(sequence[place:].tolist()):
        kind, which = codes.read(entry)
        runs = kind is EntryKind.RUN
        copies = _row(base.outputs_of, which) if runs else [which] if kind is EntryKind.LOAD else []
        alive.update(tensor for tensor in (_row(base.reads, which) if runs else [which]) if tensor not in anew)
        (anew if at else alive).update(copies)
    kept = {tensor for entry in sequence[: place + 1].tolist() if entry < codes.nodes for tensor in _row(base.outputs_of, entry)}
    return alive | {tensor for tensor in kept if base.kept[tensor]}


def _row(rows: Rows, which: int) -> list[int]:
    ids: list[int] = rows.ids[rows.ptr[which] : rows.ptr[which + 1]].tolist()
    return ids
