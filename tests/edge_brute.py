"""Every order, space, in-place result and move of a tiny network, with addresses tried one after the other. Slow and plain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from itertools import permutations, product

from lowtide.edge.graph import EdgeGraph, EdgeNode
from lowtide.edge.plan import Space

Residence = tuple[int, int, int, int]  # space, bytes, first step, step after the last


class Brute:
    """The least time of all that can be done, or of all that keeps everything where it is."""

    def __init__(
        self,
        graph: EdgeGraph,
        spaces: Sequence[Space],
        *,
        macs_per_s: float | None,
        dma: bool,
        moves: bool,
        weights_ps: Mapping[str, int] | None = None,
    ) -> None:
        self.weights_ps = weights_ps or {}  # by operator
        self.graph, self.spaces, self.macs_per_s, self.dma, self.moves = graph, spaces, macs_per_s, dma, moves
        self.root = list(range(len(graph.tensors)))
        for node in graph.nodes:
            for output, source in node.views:
                self.root[node.outputs[output]] = self.root[node.inputs[source]]
        used = {self.root[each] for node in graph.nodes for each in node.inputs} | {self.root[each] for each in graph.outputs}
        self.given = [each for each in graph.inputs if each in used]
        self.kept = {self.root[each] for each in graph.outputs}
        self.best: float = math.inf

    def least_ps(self, known: float = math.inf) -> float:
        """The least that is below what is known to be possible; else what is known. Infinite where nothing fits."""
        self.best = known
        for places in product(range(len(self.spaces)), repeat=len(self.given)):
            current = dict(zip(self.given, range(len(places)), strict=True))
            residences = [(space, self._size(each), 0, 0) for each, space in zip(self.given, places, strict=True)]
            self._go(0, [], current, residences, 0)
        return self.best

    def _size(self, root: int) -> int:
        return self.graph.tensors[root].size_bytes

    def _go(self, step: int, order: list[int], current: dict[int, int], residences: list[Residence], time: int) -> None:
        if time >= self.best:
            return
        if step == len(self.graph.nodes):
            if self._fit(residences):
                self.best = time
            return
        ready = {each for index in order for each in self.graph.nodes[index].outputs} | set(self.graph.inputs)
        ready |= {index for index, tensor in enumerate(self.graph.tensors) if tensor.constant}
        for index, node in enumerate(self.graph.nodes):
            if index not in order and ready.issuperset(node.inputs):
                self._run(step, [*order, index], current, residences, time)

    def _run(self, step: int, order: list[int], current: dict[int, int], residences: list[Residence], time: int) -> None:
        node = self.graph.nodes[order[-1]]
        fresh = [each for each in node.outputs if self.root[each] == each]
        later = {self.root[each] for index, other in enumerate(self.graph.nodes) if index not in order for each in other.inputs} | self.kept
        for places in product(range(-1, len(self.spaces)), repeat=len(fresh)):  # -1: over its input
            sources = [self._source(node, output, later, current) if place < 0 else -1 for output, place in zip(fresh, places, strict=True)]
            if any(place < 0 and source < 0 for place, source in zip(places, sources, strict=True)):
                continue
            where, homes = dict(current), list(residences)
            for output, place, source in zip(fresh, places, sources, strict=True):
                where[output] = current[source] if place < 0 else len(homes)
                if place >= 0:
                    homes.append((place, self._size(output), step, step + 1))
            touched = {self.root[each] for each in (*node.inputs, *node.outputs)} & where.keys()
            for root in touched | (later & where.keys()):
                homes[where[root]] = (*homes[where[root]][:3], step + 1)
            for space in range(len(self.spaces)) if node.workspace_bytes else (-1,):
                beside = [*homes, (space, node.workspace_bytes, step, step + 1)] if space >= 0 else homes
                if not self._alive_fits(beside, step):
                    continue
                took = self._step_ps(node, where, homes, space)
                self._go(step + 1, order, where, beside, time + took)
                if self.moves and fresh and step + 1 < len(self.graph.nodes):
                    self._move(step, order, where, beside, time + took, took, sorted((later & where.keys()) - set(fresh)))

    def _move(
        self, step: int, order: list[int], where: dict[int, int], homes: list[Residence], time: int, took: int, roots: list[int]
    ) -> None:
        for root, space in product(roots, range(len(self.spaces))):
            source = homes[where[root]][0]
            moved = [*homes, (space, self._size(root), step, step + 1)]
            if space != source and self._alive_fits(moved, step):
                rate = min(self.spaces[source].read_bytes_per_s or 0, self.spaces[space].write_bytes_per_s or 0)
                cost = _ps(self._size(root), rate)
                self._go(step + 1, order, {**where, root: len(homes)}, moved, time + (max(0, cost - took) if self.dma else cost))

    def _source(self, node: EdgeNode, output: int, later: set[int], current: dict[int, int]) -> int:
        for at, source_at in node.in_place:
            source = node.inputs[source_at]
            root = self.root[source]
            others = [each for each in node.inputs if each != source and self.root[each] == root]
            if node.outputs[at] == output and root in current and root not in later and not others:
                return root
        return -1

    def _step_ps(self, node: EdgeNode, where: dict[int, int], homes: list[Residence], workspace: int) -> int:
        looked_at = {node.inputs[source] for _, source in node.views}
        traffic = node.attributes.get("traffic")
        nbytes = dict(zip(node.inputs, traffic.read_bytes, strict=True)) if traffic else {each: self._size(each) for each in node.inputs}
        reads = [each for each in set(node.inputs) - looked_at if self.root[each] in where]
        took = sum(_ps(nbytes[each], self.spaces[homes[where[self.root[each]]][0]].read_bytes_per_s or 0) for each in reads)
        writes = [each for each in node.outputs if self.root[each] == each]
        took += sum(_ps(self._size(each), self.spaces[homes[where[each]][0]].write_bytes_per_s or 0) for each in writes)
        if traffic and workspace >= 0:
            took += _ps(traffic.ring_written_bytes, self.spaces[workspace].write_bytes_per_s or 0)
            took += _ps(traffic.ring_read_bytes, self.spaces[workspace].read_bytes_per_s or 0)
        took += self.weights_ps.get(node.name, 0)
        return took if self.macs_per_s is None else max(took, _ps(node.macs, self.macs_per_s))

    def _alive_fits(self, homes: list[Residence], step: int) -> bool:
        return all(
            sum(size for at, size, start, end in homes if at == index and start <= step < end) <= memory.room_bytes
            for index, memory in enumerate(self.spaces)
        )

    def _fit(self, homes: list[Residence]) -> bool:
        """Whether some sequence of the residences of each space, each at the lowest byte that is free, stays within its room."""
        by_space = [tuple(sorted(each for each in homes if each[0] == index)) for index in range(len(self.spaces))]
        return all(_fits(each, memory.room_bytes) for each, memory in zip(by_space, self.spaces, strict=True))


@cache
def _fits(homes: tuple[Residence, ...], room_bytes: int) -> bool:
    return any(_top(sequence) <= room_bytes for sequence in permutations(homes))


def _top(sequence: Sequence[Residence]) -> int:
    placed: list[tuple[int, Residence]] = []
    for home in sequence:
        beside = sorted((at, at + other[1]) for at, other in placed if other[2] < home[3] and home[2] < other[3])
        offset = 0
        for low, high in beside:
            if offset + home[1] <= low:
                break
            offset = max(offset, high)
        placed.append((offset, home))
    return max((at + home[1] for at, home in placed), default=0)


def _ps(amount: int, rate: float) -> int:
    return math.ceil(Fraction(amount * 10**12) / Fraction(rate))
