"""Sequences of one program carried over to its sibling: the same forward and backward pass under another part of the optimizer.

An optimizer's first step makes its state, later ones update it. What is computed again and what is swapped lies in the passes that both
have in common, so that the search for the one serves the other: a sequence keeps its entries there, and the sibling's own nodes run as
soon as they can, those that wait for nothing right before their first reader. What then stands above the peak that it is to keep, eviction
repairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtide.ir.graph import Graph, Node
from lowtide.problems.order import Ints
from lowtide.remat.archive import Archive, Point
from lowtide.remat.cost import first_wrong
from lowtide.remat.eviction import attempt
from lowtide.remat.neighbours import RULES
from lowtide.remat.offload import movable_storages
from lowtide.remat.problem import RematProblem

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
        return [carried for point in given if point.problem == which for carried in self._carried(point, at)]

    def _carried(self, point: Point, at: int) -> list[Point]:
        runs = self.runs(point.sequence)
        if first_wrong(self.target, runs) >= 0:
            return []
        points = [_point(self.target, runs, at)]
        plain = self.target.codes.runs_in(runs)
        rules = [*([] if point.recipe is None else [point.recipe.weights]), *RULES]
        most_pinned = (None,) if self.target.links is None else (point.pinned_bytes, None)
        ways = product(most_pinned, rules) if points[0].peak_bytes > point.peak_bytes else ()
        for pinned_bytes, weights in ways:
            repaired = attempt(self.target, plain, point.peak_bytes, weights, pinned_bytes=pinned_bytes).result
            if repaired is not None:
                return [*points, _point(self.target, repaired.sequence, at)]
        return points

    def runs(self, runs: Ints) -> Ints:
        """A sequence over the sibling's graph: the entries that both know, and the sibling's own nodes among them."""
        entries = self.entries[runs]
        entries = entries[entries >= 0]
        nodes, places = self._own(self._ready(entries), len(entries) - 1)
        entries_and_own: Ints = np.insert(entries, np.array(places, np.int64) + 1, nodes).astype(np.int32)
        return entries_and_own

    def _own(self, ready: Sequence[int], last: int) -> tuple[list[int], list[int]]:
        """The sibling's own nodes as they run, and the place after which each does; what waits for nothing runs when it is read."""
        preds = self._preds
        emitted = [node < self.common for node in range(len(preds))]
        places: list[tuple[int, int]] = []
        for place, node in sorted((ready[each] if ready[each] >= 0 else last, each) for each in range(self.common, len(preds))):
            stack = [node]
            while stack:
                waiting = next((before for before in preds[stack[-1]] if not emitted[before]), None)
                if waiting is not None:
                    stack.append(waiting)
                    continue
                done = stack.pop()
                if not emitted[done] and not self.target.is_view[done]:
                    places.append((done, place))
                emitted[done] = True
        return [node for node, _ in places], [place for _, place in places]

    def _ready(self, entries: Ints) -> list[int]:
        """[sibling's nodes] the place after which a node can run; -1 where it waits for nothing that both have."""
        places = np.flatnonzero(entries < self.common)
        nodes = entries[places]
        ready, last = np.full((2, len(self._preds)), -1, np.int64)
        ready[nodes[::-1]], last[nodes] = places[::-1], places
        read, writers = self._written
        np.maximum.at(ready, writers, last[read])  # what writes over what a node reads comes after its last run
        ready_nodes: list[int] = ready.tolist()
        for node in self._waiting:
            ready_nodes[node] = max(ready_nodes[node], max((ready_nodes[each] for each in self._preds[node]), default=-1))
        return ready_nodes

    @cached_property
    def _preds(self) -> list[list[int]]:
        base = self.target.problem
        return [base.pred_ids[base.pred_ptr[node] : base.pred_ptr[node + 1]].tolist() for node in range(base.node_count)]

    @cached_property
    def _waiting(self) -> list[int]:
        """The sibling's nodes that run when those before them have: its own, and views."""
        return [node for node in range(len(self._preds)) if node >= self.common or self.target.is_view[node]]

    @cached_property
    def _written(self) -> tuple[Positions, Positions]:
        """Nodes that both have, and of the sibling's own each that writes over what the one reads."""
        limits = self.target.limits
        pairs = ((node, each) for node in range(self.common) for each in limits.row(node))
        writes = np.array([pair for pair in pairs if pair[1] >= self.common], np.int64).reshape(-1, 2)
        return writes[:, 0], writes[:, 1]


def common_nodes(one: Graph, other: Graph) -> int:
    """How many nodes two graphs begin with that look the same."""
    pairs = zip(one.nodes, other.nodes, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if _look(a) != _look(b)), min(len(one.nodes), len(other.nodes)))


def _look(node: Node) -> tuple[object, ...]:
    results = [None if value is None else (value.dtype, value.shape, value.stride, value.storage.kind) for value in node.outputs]
    return node.op, len(node.inputs), len(node.writes), *results


def _same_storages(one: Graph, other: Graph) -> Iterator[tuple[int, int]]:
    """The numbers of movable storages of the one and of the same in the other: of one name, size and kind."""
    number = {(storage.name, storage.nbytes, storage.kind): place for place, storage in enumerate(movable_storages(other))}
    for place, storage in enumerate(movable_storages(one)):
        if (same := number.get((storage.name, storage.nbytes, storage.kind))) is not None:
            yield place, same


def _point(problem: RematProblem, runs: Ints, at: int) -> Point:
    return Point.of(problem, at, runs)


def carried(source: Problems, archive: Archive, target: Problems) -> Archive:
    """All points of an archive over a program's graphs, for the graphs of its sibling."""
    carried_archive = Archive(interrupted=archive.interrupted, out_of_time=archive.out_of_time)
    for point in carried_points(source, list(archive.all_points), target):
        carried_archive.add(point)
    return carried_archive


def carried_points(source: Problems, points: Sequence[Point], target: Problems) -> list[Point]:
    """Sequences over a program's graphs, for the graphs of its sibling; each as it is, and where it has to be repaired so, too."""
    points_carried: list[Point] = []
    for which, (graph, problem) in enumerate(source):
        at = max(range(len(target)), key=lambda place: (common_nodes(graph, target[place][0]), place == which))
        points_carried += Carrier.of(graph, problem, *target[at]).points(points, which, at)
    return points_carried
