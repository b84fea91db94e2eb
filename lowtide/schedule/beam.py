"""Beam search over downsets: of all sets of executed nodes one node further, the few most promising go on.

A state is a downset with the lowest peak at which it was reached. States with one downset are one state, found by a 128-bit hash. Before a
state branches it runs every ready node that raises neither live memory nor the peak so far: no completion is worse for it. Where no
state ever had to be dropped for width, the search was complete and its answer is proven.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowtide.base.kernels import kernel
from lowtide.problems.order import OrderProblem
from lowtide.schedule.base import Schedule, scheduled
from lowtide.schedule.cuts import lower_bound_bytes

_SEED = 20_231_101  # of the hash words


@dataclass(frozen=True)
class Beam:
    """Keeps the `width` states of least peak, then of least live memory; stops after `max_states` of them.

    Effort is about states x (ready nodes + nodes / 64), memory 16 bytes a state and executed node. Proves its answer where nothing was
    dropped; where `max_states` stop it, the rest follows the best state's own greedy.
    """

    width: int = 64
    max_states: int = 1_000_000

    def __post_init__(self) -> None:
        if self.width < 1 or self.max_states < 1:
            raise ValueError(f"expected width and max_states of at least 1, got {self.width} and {self.max_states}")

    def solve(self, problem: OrderProblem) -> Schedule:
        """The order of the best state that reached the end."""
        if problem.node_count == 0:
            return scheduled(problem, (), self)
        words = np.random.default_rng(_SEED).integers(0, 2**63, (problem.node_count, 2), np.int64)
        order, is_complete, states = _search(
            problem.arrays, problem.start_bytes, lower_bound_bytes(problem) - problem.resident_bytes, words, self.width, self.max_states
        )
        schedule = scheduled(problem, order, self, stats={"states": int(states)})
        return scheduled(problem, order, self, bound_bytes=schedule.peak_bytes, stats=schedule.stats) if is_complete else schedule


@kernel(inner=True, borrows=True)
def _has(bits: Any, node: Any) -> Any:
    return (bits[node >> 6] >> np.uint64(node & 63)) & np.uint64(1) == np.uint64(1)


@kernel(inner=True, borrows=True)
def _flip(bits: Any, node: Any) -> None:
    bits[node >> 6] ^= np.uint64(1) << np.uint64(node & 63)


@kernel(inner=True, borrows=True)
def _dies(tensor: Any, node: Any, done: Any, problem: Any) -> Any:
    """Whether `node` is the last reader of a tensor that is not kept."""
    for entry in range(problem.readers.ptr[tensor], problem.readers.ptr[tensor + 1]):
        if problem.readers.ids[entry] != node and not _has(done, problem.readers.ids[entry]):
            return False
    return True


@kernel(inner=True, borrows=True)
def _change(node: Any, done: Any, problem: Any) -> Any:
    """What `node` adds to live memory after the downset `done`, and what it needs beside it while it runs."""
    added, need = problem.lasting_bytes[node], problem.own_bytes[node]
    for entry in range(problem.reads.ptr[node], problem.reads.ptr[node + 1]):
        tensor = problem.reads.ids[entry]
        if not problem.kept[tensor] and problem.tensor_bytes[tensor] and _dies(tensor, node, done, problem):
            added -= problem.tensor_bytes[tensor]
    for entry in range(problem.takes.ptr[node], problem.takes.ptr[node + 1]):
        if not problem.kept[problem.takes.ids[entry]] and _dies(problem.takes.ids[entry], node, done, problem):
            need -= problem.tensor_bytes[problem.take_output[node]]
            break
    return added, need


@kernel(inner=True, borrows=True)
def _run(node: Any, done: Any, ready: Any, problem: Any) -> None:
    _flip(done, node)
    _flip(ready, node)
    for entry in range(problem.succs.ptr[node], problem.succs.ptr[node + 1]):
        succ, waits = problem.succs.ids[entry], False
        for other in range(problem.preds.ptr[succ], problem.preds.ptr[succ + 1]):
            if not _has(done, problem.preds.ids[other]):
                waits = True
                break
        if not waits:
            _flip(ready, succ)


@kernel
def _search(problem: Any, start_bytes: Any, bound_bytes: Any, words: Any, width: Any, max_states: Any) -> Any:
    """The order found, whether nothing was dropped, and how many states there were."""
    n = len(problem.own_bytes)
    row = (n + 63) // 64
    done, ready = np.zeros((width, row), np.uint64), np.zeros((width, row), np.uint64)
    next_done, next_ready = np.zeros((width, row), np.uint64), np.zeros((width, row), np.uint64)
    live, peak, left = np.zeros(width, np.int64), np.zeros(width, np.int64), np.zeros(width, np.int64)
    hashes, last = np.zeros((width, 2), np.int64), np.full(width, -1, np.int64)
    for node in range(n):
        if problem.preds.ptr[node] == problem.preds.ptr[node + 1]:
            _flip(ready[0], node)
    live[0], peak[0], left[0] = start_bytes, bound_bytes, n
    trail: Any = [(np.int64(0), np.int64(0)) for _ in range(0)]  # (node, the entry before it): the orders, as one tree
    best_last: Any = np.int64(-1)
    best_peak, is_complete, states, count, open_width = np.int64(2**62), True, 0, 1, width
    seen, chosen = {(np.int64(0), np.int64(0))}, {(np.int64(0), np.int64(0))}  # hashes; an empty set would have no type
    while count:
        seen.clear()
        alive = 0
        for state in range(count):  # what is safe at once
            moved = True
            while moved and left[state]:
                moved = False
                for word in range(row):
                    bits = ready[state, word]
                    while bits:
                        node = word * 64 + _lowest(bits)
                        bits &= bits - np.uint64(1)
                        added, need = _change(node, done[state], problem)
                        if added <= 0 and live[state] + need <= peak[state]:
                            _run(node, done[state], ready[state], problem)
                            live[state], left[state], moved = live[state] + added, left[state] - 1, True
                            _add(hashes[state], words[node])
                            trail.append((np.int64(node), last[state]))
                            last[state] = len(trail) - 1
            if left[state] == 0:
                if peak[state] < best_peak:
                    best_peak, best_last = peak[state], last[state]
                continue
            key = (hashes[state, 0], hashes[state, 1])
            if key in seen:
                continue  # states come in ascending order of peak: the one seen was no worse
            seen.add(key)
            if alive < state:
                _copy(done[state], done[alive])
                _copy(ready[state], ready[alive])
                _copy(hashes[state], hashes[alive])
                live[alive], peak[alive], left[alive], last[alive] = live[state], peak[state], left[state], last[state]
            alive += 1
        if best_peak <= bound_bytes:
            break  # as low as any order can be
        states += alive
        if states >= max_states and open_width > 1:
            open_width, is_complete = 1, False
        children: Any = [(np.int64(0), np.int64(0), np.int64(0), np.int64(0)) for _ in range(0)]  # (peak, live, state, node)
        for state in range(alive):
            for word in range(row):
                bits = ready[state, word]
                while bits:
                    node = word * 64 + _lowest(bits)
                    bits &= bits - np.uint64(1)
                    added, need = _change(node, done[state], problem)
                    reached = max(peak[state], live[state] + need)
                    if reached < best_peak:
                        children.append((reached, live[state] + added, np.int64(state), np.int64(node)))
        heapq.heapify(children)
        chosen.clear()
        picked: Any = [(np.int64(0), np.int64(0), np.int64(0), np.int64(0)) for _ in range(0)]
        while children and len(picked) < open_width:
            child = heapq.heappop(children)
            key = (hashes[child[2], 0] ^ words[child[3], 0], hashes[child[2], 1] ^ words[child[3], 1])
            if key not in chosen:
                chosen.add(key)
                picked.append(child)
        for child in children:
            key = (hashes[child[2], 0] ^ words[child[3], 0], hashes[child[2], 1] ^ words[child[3], 1])
            is_complete = is_complete and key in chosen
        old_left, old_last, old_hashes = left.copy(), last.copy(), hashes.copy()
        count = len(picked)
        for state in range(count):
            reached, after, parent, node = picked[state]
            _copy(done[parent], next_done[state])
            _copy(ready[parent], next_ready[state])
            _run(node, next_done[state], next_ready[state], problem)
            peak[state], live[state], left[state] = reached, after, old_left[parent] - 1
            _copy(old_hashes[parent], hashes[state])
            _add(hashes[state], words[node])
            trail.append((node, old_last[parent]))
            last[state] = len(trail) - 1
        done, next_done, ready, next_ready = next_done, done, next_ready, ready
    order, step, entry = np.empty(n, np.int32), n, best_last
    while entry >= 0:
        node, entry = trail[entry]
        step -= 1
        order[step] = node
    return order, is_complete or best_peak <= bound_bytes, states


@kernel(inner=True, borrows=True)
def _copy(source: Any, target: Any) -> None:
    """One row to another; an assignment of slices takes numba long to compile."""
    for position in range(len(source)):
        target[position] = source[position]


@kernel(inner=True, borrows=True)
def _add(key: Any, words: Any) -> None:
    for position in range(len(key)):
        key[position] ^= words[position]


@kernel(inner=True, borrows=True)
def _lowest(bits: Any) -> Any:
    position, low = 0, bits & (~bits + np.uint64(1))
    for shift in (32, 16, 8, 4, 2, 1):
        if low >> np.uint64(shift):
            low, position = low >> np.uint64(shift), position + shift
    return position
