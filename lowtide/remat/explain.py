"""What each tensor's absence buys and costs, read off a sequence.

    takes   a remat problem, a right sequence of it, the graph that they are of, what `remat.write_out` wrote, its reuses
    leaves  a `Eviction` for every tensor that is evicted while something still wants it

A sequence decides no lifetimes and names no reasons: both follow. A copy that a repeated run makes is *wanted* where a run that is no
repetition reads it, or a store does, or the program returns it; other copies are there for repetitions alone. The cost of a repeated run
belongs to the largest wanted tensor that it makes; where it makes none, to that of the first repetition that reads what it makes. So
each repeated run is paid for once, by the tensor that asked for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from lowtide.ir.graph import Graph, Storage
from lowtide.ir.operators.nodes import is_view
from lowtide.plan.cost_report import Eviction
from lowtide.plan.snapshot import LiveTensor, storage_specs
from lowtide.problems.order import Ints, Rows
from lowtide.remat.cost import cost_of
from lowtide.remat.entries import EntryKind
from lowtide.remat.offload import movable_storages
from lowtide.remat.problem import RematProblem


@dataclass
class _Copy:
    start: int  # the position of the entry that makes it, -1 where it is there from the start
    last: int  # the position of the last entry that uses it
    wanted: bool = False  # by something else than a repetition
    taken: bool = False  # its last user works in its memory
    repeats: list[int] = field(default_factory=list)  # positions of the repetitions that read it


@dataclass
class _Cost:
    runs: int = 0
    run_us: float = 0.0
    store_us: float = 0.0
    load_us: float = 0.0


def evictions_of(problem: RematProblem, sequence: Ints, graph: Graph, written: Graph, reuses: Ints) -> tuple[Eviction, ...]:
    """The evictions of a right sequence over `graph`, the largest tensors first.

    `written` is the graph of it, in its order, and `reuses` says by node of that what it takes over, as `cost.memory.Footprint` does.
    """
    played = _Played(problem, sequence.tolist())
    costs, known, storages = played.costs(), storage_specs(written), movable_storages(graph)
    step_of = [step for step, node in enumerate(written.nodes) if not is_view(node)]  # by entry: views are written between them
    step_of.append(len(written.nodes))
    played.take(graph, storages, reuses[step_of[:-1]])
    peak_step = step_of[peak_position(problem, sequence)]
    evictions = []
    for tensor, copies in sorted(played.copies.items()):
        wanted = _up_to_wanted(copies)
        life = [(step_of[copy.start] if copy.start >= 0 else 0, step_of[copy.last] + (not copy.taken)) for copy in wanted]
        away = tuple((end, start) for (_, end), (start, _) in pairwise(life) if end < start)
        cost = costs[tensor]
        if not away and cost == _Cost():
            continue
        live = LiveTensor.of(known[storages[tensor]], int(problem.problem.tensor_bytes[tensor]), life[0][0], min(life[-1][1], step_of[-1]))
        at_peak = any(start <= peak_step < end for start, end in away)
        evictions.append(Eviction(live, away, at_peak, cost.runs, cost.run_us, cost.store_us, cost.load_us))
    return tuple(sorted(evictions, key=lambda eviction: (-eviction.tensor.nbytes, eviction.tensor.start)))


def peak_position(problem: RematProblem, sequence: Ints) -> int:
    """Where in a sequence that node runs first at which its nodes would peak, each run once in the same order; 0 where there are none."""
    seen, firsts = set(), []
    for position, entry in enumerate(sequence.tolist()):
        if problem.codes.read(entry)[0] is EntryKind.RUN and entry not in seen:
            seen.add(entry)
            firsts.append(position)
    footprint = cost_of(problem, sequence[np.array(firsts, np.int64)]).footprint_bytes
    return firsts[int(footprint.argmax())] if firsts else 0


def _up_to_wanted(copies: list[_Copy]) -> list[_Copy]:
    """The copies up to the last that something else than a repetition wants: without repetition, one copy would have lived so long."""
    last = max((index for index, copy in enumerate(copies) if copy.wanted), default=0)
    return copies[: last + 1]


class _Played:
    """A sequence played through: the copies of each tensor, and who makes and reads them."""

    def __init__(self, problem: RematProblem, sequence: list[int]) -> None:
        self.problem, self.sequence = problem, sequence
        base = problem.problem
        self.reads, self.makes = _listed(base.reads), _listed(base.outputs_of)
        given = np.flatnonzero(base.producer < 0).tolist()
        self.copies: dict[int, list[_Copy]] = {tensor: [_Copy(-1, -1)] for tensor in given}
        self.repeated: dict[int, list[tuple[int, _Copy]]] = {}  # by position of a repetition: the tensors and copies that it makes
        self.transfers: list[tuple[EntryKind, int]] = []
        done: set[int] = set()
        for position, entry in enumerate(sequence):
            deed, which = problem.codes.read(entry)
            if deed is EntryKind.RUN:
                self._run(position, which, which in done)
                done.add(which)
            else:
                self._move(position, deed, which)
        for tensor in np.flatnonzero(base.kept).tolist():
            self.copies[tensor][-1].wanted, self.copies[tensor][-1].last = True, len(sequence)

    def take(self, graph: Graph, storages: Sequence[Storage], reuses: Ints) -> None:
        """Mark the copies whose memory is taken over: `reuses` is by entry."""
        number = {storage: tensor for tensor, storage in enumerate(storages)}
        for position in np.flatnonzero(reuses >= 0).tolist():
            value, _ = graph.nodes[self.sequence[position]].inplace[reuses[position]]
            for copy in self.copies[number[value.storage]]:
                copy.taken |= copy.last == position

    def _run(self, position: int, node: int, again: bool) -> None:
        for tensor in self.reads[node]:
            copy = self.copies[tensor][-1]
            copy.last = position
            copy.wanted |= not again
            if again:
                copy.repeats.append(position)
        copies = [(tensor, _Copy(position, position)) for tensor in self.makes[node]]
        for tensor, copy in copies:
            self.copies.setdefault(tensor, []).append(copy)
        if again:
            self.repeated[position] = copies

    def _move(self, position: int, deed: EntryKind, tensor: int) -> None:
        self.transfers.append((deed, tensor))
        if deed is EntryKind.LOAD:
            self.copies[tensor].append(_Copy(position, position))
            return
        self.copies[tensor][-1].last = position
        self.copies[tensor][-1].wanted |= deed is EntryKind.STORE

    def costs(self) -> defaultdict[int, _Cost]:
        """By tensor: what restoring it costs, each repeated run paid for once."""
        costs: defaultdict[int, _Cost] = defaultdict(_Cost)
        payer: dict[int, int] = {}  # by position of a repetition: the tensor
        for position in sorted(self.repeated, reverse=True):
            payer[position] = tensor = self._payer(position, payer)
            costs[tensor].runs += 1
            costs[tensor].run_us += float(self.problem.cost_us[self.sequence[position]])
        links = self.problem.links
        for deed, tensor in self.transfers:
            assert links is not None, "nothing is moved without links"
            if deed is EntryKind.STORE:
                costs[tensor].store_us += float(links.store_us[tensor])
            elif deed is EntryKind.LOAD:
                costs[tensor].load_us += float(links.load_us[tensor])
        return costs

    def _payer(self, position: int, payer: dict[int, int]) -> int:
        tensors = self.repeated[position]
        readers = [reader for _, copy in tensors for reader in copy.repeats]
        wanted = [tensor for tensor, copy in tensors if copy.wanted]
        if readers and not wanted:
            return payer[min(readers)]
        sizes = self.problem.problem.tensor_bytes
        return max(wanted or [tensor for tensor, _ in tensors], key=lambda tensor: (int(sizes[tensor]), -tensor))


def _listed(rows: Rows) -> list[list[int]]:
    ptr, ids = rows.ptr.tolist(), rows.ids.tolist()
    return [ids[start:end] for start, end in pairwise(ptr)]
