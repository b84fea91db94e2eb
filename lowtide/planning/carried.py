"""Sequences of one program carried over to its sibling: the same forward and backward pass under another part of the optimizer.

An optimizer's first step makes its state, later ones update it. What is computed again and what is swapped lies in the passes that both
have in common, so that the search for the one serves the other: a sequence keeps its entries there, and the sibling's own nodes run as
soon as they can, those that wait for nothing right before their first reader. What then stands above the peak that it is to keep, eviction
repairs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtide.ir.graph import Graph, Node
from lowtide.problems.order import Ints
from lowtide.remat.cost import cost_of, first_wrong
from lowtide.remat.evict.eviction import evict
from lowtide.remat.offload import movable_storages
from lowtide.remat.problem import RematProblem
from lowtide.remat.sweep.archive import Archive, Point
from lowtide.remat.sweep.neighbours import RULES

Positions = NDArray[np.int64]
Problems: TypeAlias = "Sequence[tuple[Graph, RematProblem]]"


@dataclass(frozen=True, eq=False)
class Carrier:
    """From sequences over one graph to sequences over its sibling."""

    source: RematProblem
    target: RematProblem
    common: int  # nodes that both begin with, in program order
    entries: Ints  # [source's entries] the sibling's entry that does the same, -1 where there is none

    @classmethod
    def of(cls, source_graph: Graph, source: RematProblem, target_graph: Graph, target: RematProblem) -> Carrier:
        """What both graphs have in common."""
        common = common_nodes(source_graph, target_graph)
        there, here = target.codes, source.codes
        entries = np.full(here.store(here.storages), -1, np.int32)
        entries[:common] = np.arange(common)
        for storage, same in _same_storages(source_graph, target_graph):
            if storage < here.storages and same < there.storages:
                for one, other in ((here.store, there.store), (here.drop, there.drop), (here.load, there.load)):
                    entries[one(storage)] = other(same)
        return cls(source, target, common, entries)

    def points(self, given: Sequence[Point], which: int, at: int) -> list[Point]:
        """Those of problem `which`, for the sibling's problem `at`; what does not keep the peak that it had is repaired."""
        return [found for point in given if point.problem == which for found in self._carried(point, at)]

    def _carried(self, point: Point, at: int) -> list[Point]:
        runs = self.runs(point.sequence)
        if first_wrong(self.target, runs) >= 0:
            return []
        found = [_point(self.target, runs, at)]
        plain = self.target.codes.runs_in(runs)
        rules = [*([] if point.recipe is None else [point.recipe.weights]), *RULES]
        for weights in rules if found[0].peak_bytes > point.peak_bytes else ():
            repaired = evict(self.target, plain, point.peak_bytes, weights)
            if repaired is not None:
                return [*found, _point(self.target, repaired.sequence, at)]
        return found

    def runs(self, runs: Ints) -> Ints:
        """A sequence over the sibling's graph: the entries that both know, and the sibling's own nodes among them."""
        entries = self.entries[runs]
        entries = entries[entries >= 0]
        after = self._own(entries)
        pieces = [after.get(-1, [])]
        for place, entry in enumerate(entries.tolist()):
            pieces += [[entry], after.get(place, [])]
        return np.array([entry for piece in pieces for entry in piece], np.int32)

    def _own(self, entries: Ints) -> dict[int, list[int]]:
        """The sibling's own nodes by the place after which they run."""
        ready, base = self._ready(entries), self.target.problem
        preds = [base.pred_ids[base.pred_ptr[node] : base.pred_ptr[node + 1]].tolist() for node in range(base.node_count)]
        found: defaultdict[int, list[int]] = defaultdict(list)
        emitted = np.zeros(base.node_count, np.bool_)
        emitted[: self.common] = True
        own = range(self.common, base.node_count)
        last = len(entries) - 1
        for node in sorted(own, key=lambda each: (ready[each] if ready[each] >= 0 else last, each)):
            place, stack = int(ready[node]) if ready[node] >= 0 else last, [node]
            while stack:
                waiting = [before for before in preds[stack[-1]] if not emitted[before]]
                if waiting:
                    stack.append(waiting[0])
                    continue
                done = stack.pop()
                if not emitted[done] and not self.target.is_view[done]:
                    found[place].append(done)
                emitted[done] = True
        return found

    def _ready(self, entries: Ints) -> Positions:
        """[sibling's nodes] the place after which a node can run; -1 where it waits for nothing that both have."""
        base, common = self.target.problem, self.common
        first, last = np.full(base.node_count, -1, np.int64), np.full(base.node_count, -1, np.int64)
        for place, entry in enumerate(entries.tolist()):
            if entry < common:
                first[entry], last[entry] = (place if first[entry] < 0 else first[entry]), place
        ready = first
        limits = self.target.limits
        for node in range(common):  # what writes over what a node reads comes after its last run
            for writer in limits.ids[limits.ptr[node] : limits.ptr[node + 1]].tolist():
                if writer >= common:
                    ready[writer] = max(ready[writer], last[node])
        for node in range(base.node_count):
            if node >= common or self.target.is_view[node]:
                before = base.pred_ids[base.pred_ptr[node] : base.pred_ptr[node + 1]]
                ready[node] = max(ready[node], ready[before].max(initial=-1))
        return ready


def common_nodes(one: Graph, other: Graph) -> int:
    """How many nodes two graphs begin with that look the same."""
    pairs = zip(one.nodes, other.nodes, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if _look(a) != _look(b)), min(len(one.nodes), len(other.nodes)))


def _look(node: Node) -> tuple[object, ...]:
    made = [None if value is None else (value.dtype, value.shape, value.stride, value.storage.kind) for value in node.outputs]
    return node.op, len(node.inputs), len(node.writes), *made


def _same_storages(one: Graph, other: Graph) -> Iterator[tuple[int, int]]:
    """The numbers of movable storages of the one and of the same in the other: of one name, size and kind."""
    number = {(storage.name, storage.nbytes, storage.kind): place for place, storage in enumerate(movable_storages(other))}
    for place, storage in enumerate(movable_storages(one)):
        if (same := number.get((storage.name, storage.nbytes, storage.kind))) is not None:
            yield place, same


def _point(problem: RematProblem, runs: Ints, at: int) -> Point:
    cost = cost_of(problem, runs)
    return Point(cost.peak_bytes, cost.time_us, at, runs)


def carried(source: Problems, archive: Archive, target: Problems) -> Archive:
    """All points of an archive over a program's graphs, for the graphs of its sibling."""
    found = Archive(interrupted=archive.interrupted, out_of_time=archive.out_of_time)
    for point in carried_points(source, archive.points, target):
        found.add(point)
    return found


def carried_points(source: Problems, points: Sequence[Point], target: Problems) -> list[Point]:
    """Sequences over a program's graphs, for the graphs of its sibling; each as it is, and where it has to be repaired so, too."""
    found: list[Point] = []
    for which, (graph, problem) in enumerate(source):
        at = max(range(len(target)), key=lambda place: (common_nodes(graph, target[place][0]), place == which))
        found += Carrier.of(graph, problem, *target[at]).points(points, which, at)
    return found
