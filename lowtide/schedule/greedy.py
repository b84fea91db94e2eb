"""Orders found in one pass: as written, the two reverse post-orders, and a list of ready nodes.

All are numba kernels without recursion, in time linear in the edges, with a logarithm for the ready list's heap.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel
from lowtide.base.solver_text import check_choice
from lowtide.problems.order import Ints, OrderProblem, Rows
from lowtide.schedule.base import Schedule, scheduled


@dataclass(frozen=True)
class ProgramOrder:
    """The order as written: nodes by index, and before each what it still needs."""

    def solve(self, problem: OrderProblem) -> Schedule:
        roots = np.arange(problem.node_count, dtype=np.int32)
        return scheduled(problem, _depth_first(*problem.preds, roots), self)


@dataclass(frozen=True)
class ReversePostOrder:
    """A depth-first order, in either of the readings that the literature gives the name; their peaks can be a fifth apart.

    From "inputs": depth first over successors, last finished first. From "outputs": depth first over predecessors, first finished
    first, so that a node runs once all that it needs has run. Nodes are visited in ascending order.
    """

    root: Literal["inputs", "outputs"] = "inputs"

    def __post_init__(self) -> None:
        check_choice("root", self.root, ("inputs", "outputs"))

    def solve(self, problem: OrderProblem) -> Schedule:
        """The depth-first order from this root."""
        if self.root == "inputs":
            return scheduled(problem, _depth_first(*problem.succs, _ends(problem.preds))[::-1], self)
        return scheduled(problem, _depth_first(*problem.preds, _ends(problem.succs)), self)


@dataclass(frozen=True)
class ReadyList:
    """Of the nodes that are ready, runs the one that adds least to live memory, then the one that needs least, then the oldest.

    What a node adds is the bytes that it makes and that outlive it, less those that die at it. What it needs is all the bytes that it
    makes and its workspace, less what it may take over. The oldest is by "index" the first as written, and by "waiting" the one that
    has been ready for longest.
    """

    oldest: Literal["index", "waiting"] = "index"

    def __post_init__(self) -> None:
        check_choice("oldest", self.oldest, ("index", "waiting"))

    def solve(self, problem: OrderProblem) -> Schedule:
        order = _ready_list(problem.arrays, self.oldest == "index")
        return scheduled(problem, order, self)


def _ends(rows: Rows) -> Ints:
    """The nodes whose row is empty, ascending."""
    return np.flatnonzero(np.diff(rows.ptr) == 0).astype(np.int32)


@kernel
def _depth_first(ptr: Any, ids: Any, roots: Any) -> NDArray[np.int32]:
    """The nodes in the order in which a depth-first walk from `roots` along `ids` finishes them."""
    n = len(ptr) - 1
    order, stack, depth, finished = np.empty(n, np.int32), np.empty(n, np.int32), 0, 0
    entry, seen = ptr[:-1].copy(), np.zeros(n, np.bool_)
    for root in roots:
        if seen[root]:
            continue
        seen[root], stack[0], depth = True, root, 1
        while depth:
            node = stack[depth - 1]
            while entry[node] < ptr[node + 1] and seen[ids[entry[node]]]:
                entry[node] += 1
            if entry[node] < ptr[node + 1]:
                stack[depth] = ids[entry[node]]
                seen[stack[depth]] = True
                depth += 1
            else:
                order[finished] = node
                finished, depth = finished + 1, depth - 1
    return order


@kernel(inner=True, borrows=True)
def _need_bytes(node: Any, problem: Any, left: Any) -> Any:
    """What a node adds to live memory while it runs, were it to run now."""
    for entry in range(problem.takes.ptr[node], problem.takes.ptr[node + 1]):
        if left[problem.takes.ids[entry]] == 1 and not problem.kept[problem.takes.ids[entry]]:
            return problem.own_bytes[node] - problem.tensor_bytes[problem.take_output[node]]
    return problem.own_bytes[node]


@kernel(inner=True)
def _reader_sums(readers: Any) -> NDArray[np.int64]:
    sums = np.zeros(len(readers.ptr) - 1, np.int64)
    for tensor in range(len(sums)):
        for entry in range(readers.ptr[tensor], readers.ptr[tensor + 1]):
            sums[tensor] += readers.ids[entry]
    return sums


@kernel
def _ready_list(problem: Any, by_index: Any) -> NDArray[np.int32]:
    """The order of the list, from a heap whose entries are renewed, never removed.

    What a node adds and needs changes only when a tensor gets down to its last reader, and then only falls. So that node is pushed
    again, comes up by its newest entry, and is passed over when an older one comes up after it has run.
    """
    n = len(problem.preds.ptr) - 1
    order, step, done = np.empty(n, np.int32), 0, np.zeros(n, np.bool_)
    age, clock = np.arange(n) if by_index else np.full(n, -1), 0
    waiting, left, added_bytes = problem.preds.ptr[1:] - problem.preds.ptr[:-1], problem.uses.copy(), problem.lasting_bytes.copy()
    reader = _reader_sums(problem.readers)  # of those that have not run: once there is one, the sum is that one
    for tensor in range(len(left)):
        if left[tensor] == 1 and not problem.kept[tensor]:
            added_bytes[reader[tensor]] -= problem.tensor_bytes[tensor]
    heap: Any = [(np.int64(0), np.int64(0), np.int64(0), np.int64(0)) for _ in range(0)]  # none, and their types
    fresh = [np.int64(node) for node in range(n) if waiting[node] == 0]
    while fresh or heap:
        for node in fresh:
            if age[node] < 0:
                age[node], clock = clock, clock + 1
            need_bytes = _need_bytes(node, problem, left)
            heapq.heappush(heap, (added_bytes[node], need_bytes, age[node], node))
        fresh.clear()
        node = heapq.heappop(heap)[3]
        if done[node]:
            continue
        order[step], step, done[node] = node, step + 1, True
        for entry in range(problem.reads.ptr[node], problem.reads.ptr[node + 1]):
            tensor = problem.reads.ids[entry]
            left[tensor] -= 1
            reader[tensor] -= node
            if left[tensor] == 1 and not problem.kept[tensor]:
                added_bytes[reader[tensor]] -= problem.tensor_bytes[tensor]
                if waiting[reader[tensor]] == 0:
                    fresh.append(reader[tensor])
        for entry in range(problem.succs.ptr[node], problem.succs.ptr[node + 1]):
            waiting[problem.succs.ids[entry]] -= 1
            if waiting[problem.succs.ids[entry]] == 0:
                fresh.append(np.int64(problem.succs.ids[entry]))
    return order
