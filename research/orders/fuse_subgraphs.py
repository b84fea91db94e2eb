"""Fusing nodes that may as well run together, so that the least peak stays what it is (ICCAD'23, section IV.B and Algorithm 1).

Two rules, applied until neither does anything:

- *Pairs* (after Theorem IV.1). Node u whose only successor is v may wait for v, if running it never lowers live memory and it never
  needs more than v right after it. Node v whose only predecessor is u may follow it at once, if running it never raises live memory
  and it never needs more than u did. "Never" is over all orders: a tensor that others read too counts at its worst.
- *Regions* (after Theorem IV.2). A set of nodes with one entry and one exit that shares no dying tensor with the rest runs in one go, if
  live memory after each part of it is at least what it is before and after all of it. The theorem asks this of one order of the
  region; an order with a valley might then still be better, so here it is asked of all, by minimum cuts.

What a fused node needs is then the same number whatever has run before, which is what makes it a node.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from lowtide.problems import Status
from lowtide.problems.order import OrderProblem
from lowtide.schedule.base import Solver
from lowtide.schedule.beam import Beam
from research.orders.live import least_live
from research.orders.reduce import Group, Reduced, rebuild, split


@dataclass(frozen=True)
class FuseSubgraphs:
    """Fuses pairs up to `largest` nodes in one, and regions of up to `region` nodes where `inner` proves their best order."""

    largest: int = 256
    region: int = 24
    inner: Solver = field(default_factory=lambda: Beam(width=1024, max_states=20_000))

    def apply(self, problem: OrderProblem) -> Reduced:
        """The problem of fused nodes: of the same least peak, each of its best orders expanding to a best one."""
        web = _Web(problem)
        pairs = deque(range(problem.node_count))
        while True:
            _fuse_pairs(web, pairs, self.largest)
            pairs = deque(self._fuse_regions(web))
            if not pairs:
                break
        return web.reduced()

    def _fuse_regions(self, web: _Web) -> list[int]:
        """Fuses each region that is legal, the smallest from each entry; the nodes that they became."""
        position = web.positions()
        fused = []
        for entry in sorted(web.alive, key=position.__getitem__):
            if entry in web.alive and len(web.succs[entry]) > 1:
                fused += self._fused_region(web, entry, position)
        return fused

    def _fused_region(self, web: _Web, entry: int, position: dict[int, int]) -> list[int]:
        inside: list[int] = []
        frontier = set(web.succs[entry])
        while frontier and len(inside) < self.region:
            node = min(frontier, key=position.__getitem__)
            if not web.preds[node] <= {entry, *inside}:
                return []  # waits for something else: so would the whole
            inside.append(node)
            frontier.discard(node)
            one_exit = not frontier and all(web.succs[other] for other in inside[:-1])  # a node that nobody waits for is an exit, too
            if one_exit and len(inside) > 1 and (run := self._legal_run(web, inside)):
                order, need_bytes = run
                return [web.merge(order, need_bytes, [])]
            frontier |= web.succs[node]
        return []

    def _legal_run(self, web: _Web, inside: list[int]) -> tuple[list[int], int] | None:
        """The best order of a region's nodes and what it needs, where it may run in one go; its last node is the exit."""
        piece = web.piece(inside)
        if piece is None:
            return None
        start_bytes = piece.resident_bytes + piece.start_bytes
        end_bytes = piece.resident_bytes + int(piece.tensor_bytes[piece.kept].sum())
        later = np.zeros(len(inside), np.bool_)
        later[-1] = True
        for source in np.flatnonzero(np.diff(piece.pred_ptr) == 0):
            done = np.zeros(len(inside), np.bool_)
            done[source] = True
            if least_live(piece, done, later).need_bytes < max(start_bytes, end_bytes):
                return None
        schedule = self.inner.solve(piece)
        if schedule.status is not Status.OPTIMAL:
            return None
        return [inside[node] for node in schedule.order], schedule.peak_bytes - start_bytes


class _Web:
    """A problem whose nodes are being fused: a group goes by the number of its last node."""

    def __init__(self, problem: OrderProblem) -> None:
        self.problem = problem
        self.size: list[int] = problem.tensor_bytes.tolist()
        self.kept: list[bool] = problem.kept.tolist()
        self.preds, self.succs = [set(row) for row in split(problem.preds)], [set(row) for row in split(problem.succs)]
        self.readers = [set(row) for row in split(problem.readers)]
        self.reads, self.makes = [set(row) for row in split(problem.reads)], [set(row) for row in split(problem.outputs_of)]
        self.takes, self.first = split(problem.takes), problem.take_output.tolist()
        self.need: list[int] = (problem.made_bytes + problem.workspace_bytes).tolist()  # beside what is alive before
        self.runs = [[node] for node in range(problem.node_count)]
        self.alive = set(range(problem.node_count))

    def lasting_bytes(self, node: int) -> int:
        """What it makes that outlives it."""
        return sum(self.size[tensor] for tensor in self.makes[node] if self.readers[tensor] or self.kept[tensor])

    def dies(self, tensor: int, node: int, before: set[int]) -> bool | None:
        """Whether a tensor that `node` reads dies at it, where all of `before` have run: always, never, or None where that depends."""
        others = self.readers[tensor] - {node}
        if self.kept[tensor] or not others.isdisjoint(self.succs[node]):
            return False
        return True if others <= before else None

    def freed_bytes(self, node: int, before: set[int]) -> tuple[int, bool]:
        """What `node` frees for certain, and whether it may free more."""
        certain, more = 0, False
        for tensor in self.reads[node]:
            dies = self.dies(tensor, node, before) if self.size[tensor] else False
            certain += self.size[tensor] if dies else 0
            more |= dies is None
        return certain, more

    def taken(self, node: int, before: set[int]) -> tuple[int, list[int]]:
        """What `node` takes over for certain, and where that is nothing, the candidates that it may take over."""
        fates = {tensor: self.dies(tensor, node, before) for tensor in self.takes[node]}
        if any(fates.values()):
            return self.size[self.first[node]], []
        return 0, [tensor for tensor, dies in fates.items() if dies is None]

    def merge(self, run: list[int], need_bytes: int, takes: list[int]) -> int:
        """Makes one group of several, which run in this order; `takes` may be taken over by the last one's output. Returns the last."""
        last, members = run[-1], set(run)
        outputs = set().union(*(self.makes[node] for node in run))
        read = set().union(*(self.reads[node] for node in run))
        for tensor in read:
            self.readers[tensor] -= members
        read -= outputs
        for tensor in read:
            self.readers[tensor].add(last)
        for node in run:
            self._relink(self.preds[node], self.succs, node, last)
            self._relink(self.succs[node], self.preds, node, last)
        self.preds[last] = set().union(*(self.preds[node] for node in run)) - members
        self.succs[last] = set().union(*(self.succs[node] for node in run)) - members
        self.makes[last] = {
            tensor for tensor in outputs if self.readers[tensor] or self.kept[tensor] or (takes and tensor == self.first[last])
        }
        self.reads[last], self.need[last], self.takes[last] = read, need_bytes, takes
        self.runs[last] = [member for node in run for member in self.runs[node]]
        self.first[last] = self.first[last] if takes else -1
        self.alive -= members - {last}
        return last

    @staticmethod
    def _relink(neighbours: set[int], back: list[set[int]], node: int, last: int) -> None:
        if node != last:
            for other in neighbours:
                back[other].discard(node)
                back[other].add(last)

    def positions(self) -> dict[int, int]:
        """By group: its place in a topological order of them."""
        waits = {node: len(self.preds[node]) for node in self.alive}
        order = [node for node in sorted(self.alive) if not waits[node]]
        for node in order:
            for succ in sorted(self.succs[node]):
                waits[succ] -= 1
                if not waits[succ]:
                    order.append(succ)
        return {node: position for position, node in enumerate(order)}

    def piece(self, inside: list[int]) -> OrderProblem | None:
        """The problem of a region alone, its exit last, or None where a tensor may die within it or elsewhere, as it happens."""
        members = set(inside)
        before = set().union(*(self.preds[node] for node in inside)) - members
        outputs = set().union(*(self.makes[node] for node in inside))
        lasting = {tensor for tensor in outputs if self.kept[tensor] or not self.readers[tensor] <= members}
        for tensor in set().union(*(self.reads[node] for node in inside)) - outputs:
            others = self.readers[tensor] - members
            if self.kept[tensor] or not others.isdisjoint(self.succs[inside[-1]]):
                lasting.add(tensor)  # it lives throughout, and is left out
            elif self.size[tensor] and not others <= before:
                return None
        groups = [
            Group(
                name=self.problem.names[node],
                run=[node],
                makes=sorted(self.makes[node]),
                reads=sorted(tensor for tensor in self.reads[node] if tensor in outputs or tensor not in lasting),
                before=self.preds[node] & members,
                takes=[tensor for tensor in self.takes[node] if tensor not in lasting],
                first=self.first[node],
            )
            for node in inside
        ]
        return rebuild(self.problem, groups, [self.need[node] for node in inside], kept=lasting).problem

    def reduced(self) -> Reduced:
        """What is left, as a problem."""
        groups = [
            Group(
                name=self._name(node),
                run=self.runs[node],
                makes=sorted(self.makes[node]),
                reads=sorted(self.reads[node]),
                before=self.preds[node],
                takes=self.takes[node],
                first=self.first[node],
            )
            for node in sorted(self.alive)
        ]
        return rebuild(self.problem, groups, [self.need[node] for node in sorted(self.alive)])

    def _name(self, node: int) -> str:
        more = len(self.runs[node]) - 1
        return f"{self.problem.names[node]} and {more} before" if more else self.problem.names[node]


def _fuse_pairs(web: _Web, pairs: deque[int], largest: int) -> None:
    """Fuses pairs around the nodes in `pairs`, and around what they become."""
    while pairs:
        node = pairs.popleft()
        if node not in web.alive:
            continue
        for first, second in _pairs_of(web, node):
            if len(web.runs[first]) + len(web.runs[second]) > largest:
                continue
            fused = _delayed(web, first, second) or _advanced(web, first, second)
            if fused:
                last = web.merge([first, second], *fused)
                pairs.append(last)
                pairs.extend(sorted(web.preds[last] | web.succs[last]))
                break


def _pairs_of(web: _Web, node: int) -> list[tuple[int, int]]:
    """The pairs with `node` in which one waits for nobody else or nobody else waits for one."""
    before, after = web.preds[node], web.succs[node]
    pairs = [(pred, node) for pred in sorted(before) if len(before) == 1 or len(web.succs[pred]) == 1]
    return pairs + [(node, succ) for succ in sorted(after) if len(after) == 1 or len(web.preds[succ]) == 1]


def _delayed(web: _Web, first: int, second: int) -> tuple[int, list[int]] | None:
    """What the pair needs and may take over where `first` may wait for `second`, its only successor; None where it may not."""
    freed_bytes, more = web.freed_bytes(first, web.preds[first])
    rise_bytes = web.lasting_bytes(first) - freed_bytes
    if len(web.succs[first]) > 1 or more or rise_bytes < 0:
        return None
    taken_bytes, takes = web.taken(second, web.preds[second] | web.preds[first])
    need_bytes = rise_bytes + web.need[second] - taken_bytes
    perhaps_bytes = web.size[web.first[second]] if takes else 0
    return (need_bytes, takes) if web.need[first] <= need_bytes - perhaps_bytes else None


def _advanced(web: _Web, first: int, second: int) -> tuple[int, list[int]] | None:
    """What the pair needs where `second` may follow `first`, its only predecessor, at once; None where it may not."""
    taken_bytes, takes = web.taken(first, web.preds[first])
    if len(web.preds[second]) > 1 or takes:
        return None
    before = web.preds[first] | {first}
    freed_bytes, _ = web.freed_bytes(second, before)
    first_freed_bytes, _ = web.freed_bytes(first, web.preds[first])
    rise_bytes, need_bytes = web.lasting_bytes(first) - first_freed_bytes, web.need[first] - taken_bytes
    fits = rise_bytes + web.need[second] - web.taken(second, before)[0] <= need_bytes
    return (need_bytes, []) if fits and web.lasting_bytes(second) <= freed_bytes else None
