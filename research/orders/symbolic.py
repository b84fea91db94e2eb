"""The ready list on symbolic memory impact: BladeDISC++'s scheduler (Yuan et al., 2024, section 2.2, figure 2).

Of the nodes that are ready, the next is one of least memory impact: the bytes that it makes and that outlive it, less those that die at it,
as an expression, compared over the whole range. Where impacts cannot be compared, the node wins that "results in smaller overall tensor
lifetimes based on the graph topology", of which the paper says no more. Here that is first the node that leaves fewer tensors alive, as
each of them lives one step longer for each that follows; then the one whose results' last readers are nearest, in levels of the
graph; then the first as written.

The paper compares all ready nodes one by one. Nodes of the same impact stand in one heap here, so a step looks at distinct impacts only.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from lowtide.cost.symbolic import SymbolicProblem
from lowtide.ir.shapes.polynomial import Polynomial, total
from lowtide.problems.order import Rows
from research.shapes.compare import sign_of
from research.shapes.sign import Sign


def symbolic_ready_list(problem: SymbolicProblem) -> tuple[int, ...]:
    """The order of node indices; the same for the same problem."""
    return tuple(_ReadyList(problem).order())


def impact(problem: SymbolicProblem, done: Sequence[int], node: int) -> Polynomial:
    """What a node adds to live memory, in bytes, after the nodes of `done`, in their order."""
    ready = _ReadyList(problem)
    for earlier in done:
        ready.run(earlier)
    return ready.impact(node)[0]


class _ReadyList:
    """The nodes that are ready, by impact, while an order grows."""

    def __init__(self, problem: SymbolicProblem) -> None:
        self._bare, self._bytes, self._dimensions = problem.structure, tuple(map(Polynomial.of, problem.tensor_bytes)), problem.dimensions
        self._waiting = np.diff(self._bare.pred_ptr).tolist()
        self._left = self._bare.uses.tolist()  # by tensor: readers to come, and one where it is kept
        self._done = [False] * self._bare.node_count
        self._distance = _distances(problem)
        self._ready: dict[Polynomial, list[tuple[int, int, int]]] = {}  # by impact: (tensors left alive, distance, node), a heap

    def order(self) -> Iterator[int]:
        """All nodes, each as it is chosen."""
        for node, count in enumerate(self._waiting):
            if count == 0:
                self._push(node)
        for _ in range(self._bare.node_count):
            node = self._choose()
            yield node
            self.run(node)

    def impact(self, node: int) -> tuple[Polynomial, int]:
        """What a node would add to live memory were it to run now, in bytes and in tensors."""
        results = [tensor for tensor in _row(self._bare.outputs_of, node) if self._left[tensor]]
        dying = [tensor for tensor in _row(self._bare.reads, node) if self._left[tensor] == 1 and not self._bare.kept[tensor]]
        pieces = (*(self._bytes[tensor] for tensor in results), *(self._bytes[tensor].scaled(-1) for tensor in dying))
        return total(pieces), len(results) - len(dying)

    def _push(self, node: int) -> None:
        """A node that is ready, or whose impact has changed; the entry that it had is passed over later."""
        impact, tensors = self.impact(node)
        heapq.heappush(self._ready.setdefault(impact, []), (tensors, self._distance[node], node))

    def _choose(self) -> int:
        """The best of the heads of all heaps, compared one after the other as the paper does."""
        best: Polynomial | None = None
        for impact in list(self._ready):
            heap = self._ready[impact]
            while heap and (self._done[heap[0][2]] or self.impact(heap[0][2])[0] != impact):
                heapq.heappop(heap)
            if not heap:
                del self._ready[impact]
            elif best is None or self._is_better(impact, best):
                best = impact
        assert best is not None  # an acyclic problem always has a node that is ready
        return heapq.heappop(self._ready[best])[2]

    def _is_better(self, impact: Polynomial, best: Polynomial) -> bool:
        sign = sign_of(impact - best, self._dimensions)
        if sign in (Sign.NOT_NEGATIVE, Sign.NOT_POSITIVE):
            return sign is Sign.NOT_POSITIVE
        return self._ready[impact][0] < self._ready[best][0]

    def run(self, node: int) -> None:
        """What running a node changes for those that have not run."""
        self._done[node] = True
        for tensor in _row(self._bare.reads, node):
            self._left[tensor] -= 1
            if self._left[tensor] == 1 and not self._bare.kept[tensor]:
                last = next(reader for reader in _row(self._bare.readers, tensor) if not self._done[reader])
                if self._waiting[last] == 0:
                    self._push(last)
        for later in _row(self._bare.succs, node):
            self._waiting[later] -= 1
            if self._waiting[later] == 0:
                self._push(later)


def _distances(problem: SymbolicProblem) -> list[int]:
    """By node: how many levels on the last reader of what it makes stands; a level is the longest way from a node without predecessors."""
    bare = problem.structure
    level = [0] * bare.node_count
    waiting = np.diff(bare.pred_ptr).tolist()
    pending = [node for node, count in enumerate(waiting) if count == 0]
    while pending:
        node = pending.pop()
        for later in _row(bare.succs, node):
            level[later] = max(level[later], level[node] + 1)
            waiting[later] -= 1
            if waiting[later] == 0:
                pending.append(later)
    end = max(level, default=0) + 1  # where what is kept lives to

    def reach(tensor: int) -> int:
        return max([end * bool(bare.kept[tensor]), *(level[reader] for reader in _row(bare.readers, tensor))])

    return [sum(max(0, reach(tensor) - level[node]) for tensor in _row(bare.outputs_of, node)) for node in range(bare.node_count)]


def _row(rows: Rows, index: int) -> list[int]:
    return [int(each) for each in rows.ids[rows.ptr[index] : rows.ptr[index + 1]]]
