"""The least time of a small remat problem under a limit, from nothing but the definition: all sequences, by Dijkstra's algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from lowtide.problems.order import Rows
from lowtide.remat.bound import TimeBound
from lowtide.remat.problem import RematProblem
from tests.chains import Builder

State = tuple[int, frozenset[int]]  # nodes of the order that have run, tensors that are there


def time_bound_us(problem: RematProblem, limit_bytes: int) -> float:
    """Microseconds that every sequence takes at least within a limit, as lowtide proves it."""
    return TimeBound(problem).us(limit_bytes)


def least_us(problem: RematProblem, order: Sequence[int], limit_bytes: int) -> float:
    """The least time of all sequences without swapping whose first runs are in this order; infinite where none keeps the limit."""
    search = _Search(problem, order, limit_bytes)
    heap: list[tuple[float, int, State]] = [(0.0, 0, search.start())]
    best, count = {search.start(): 0.0}, 0
    while heap:
        time_us, _, state = heappop(heap)
        if search.is_end(state):
            return time_us
        if time_us > best[state]:
            continue
        for own_us, after in search.steps(state):
            if time_us + own_us < best.get(after, np.inf):
                best[after], count = time_us + own_us, count + 1
                heappush(heap, (time_us + own_us, count, after))
    return float("inf")


def levels(problem: RematProblem, order: Sequence[int], peak_bytes: int) -> list[int]:
    """All limits below a peak that some sequence keeps."""
    found = []
    for limit_bytes in reversed(range(problem.problem.resident_bytes, peak_bytes)):
        if least_us(problem, order, limit_bytes) == np.inf:
            break
        found.append(limit_bytes)
    return found


def small_steps(count: int) -> Iterator[RematProblem]:
    """Little training steps, the same each time: layers in a row, some with a shortcut, and their backward passes; some draw."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        step, acts = Builder(), []
        for layer in range(int(rng.integers(3, 5))):
            shortcut = (acts[int(rng.integers(layer - 1))],) if layer > 1 and rng.random() < 0.4 else ()
            acts += step.node((*acts[-1:], *shortcut), (int(rng.integers(1, 7)),), float(rng.integers(1, 6)), repeatable=rng.random() < 0.9)
        grad: tuple[int, ...] = ()
        for act in reversed(acts):
            grad = step.node((*grad, act), (int(rng.integers(1, 4)),), float(rng.integers(1, 6)))
        yield step.problem(int(rng.integers(3)))


class _Search:
    """Steps from state to state: a tensor is freed, or a node runs and may work in the memory of an input that it frees."""

    def __init__(self, problem: RematProblem, order: Sequence[int], limit_bytes: int) -> None:
        base = problem.problem
        self.problem, self.order = problem, list(order)
        self.room_bytes = limit_bytes - base.resident_bytes
        self.reads, self.makes, self.takes, self.limits = map(_listed, (base.reads, base.outputs_of, base.takes, problem.limits))
        self.bytes_of = base.tensor_bytes.tolist()
        self.kept = frozenset(np.flatnonzero(base.kept).tolist())

    def start(self) -> State:
        return 0, frozenset(np.flatnonzero(self.problem.problem.producer < 0).tolist())

    def is_end(self, state: State) -> bool:
        return state[0] == len(self.order) and self.kept <= state[1]

    def steps(self, state: State) -> Iterator[tuple[float, State]]:
        done, here = state
        yield from ((0.0, (done, here - {tensor})) for tensor in here)
        if done < len(self.order):
            yield from self.run(self.order[done], done + 1, here)
        for node in self.order[:done]:
            if self.problem.repeatable[node] and not self.limits[node] & set(self.order[:done]):
                yield from self.run(node, done, here)

    def run(self, node: int, done: int, here: frozenset[int]) -> Iterator[tuple[float, State]]:
        if not self.reads[node] <= here:
            return
        others, made = here - self.makes[node], self.makes[node]
        need = sum(self.bytes_of[tensor] for tensor in others | made) + int(self.problem.problem.workspace_bytes[node])
        took = self.bytes_of[int(self.problem.problem.take_output[node])] if self.takes[node] else 0
        us = float(self.problem.cost_us[node])
        if need <= self.room_bytes:
            yield us, (done, others | made)
        if need - took <= self.room_bytes:
            yield from ((us, (done, (others - {tensor}) | made)) for tensor in self.takes[node])


def _listed(rows: Rows) -> list[frozenset[int]]:
    return [frozenset(rows.ids[start:end].tolist()) for start, end in pairwise(rows.ptr.tolist())]


def small_blocks(count: int, blocks: int = 3, inner: int = 1) -> Iterator[RematProblem]:
    """Little networks of narrow places, the same each time: what a block makes inside is large, what it hands on is one byte."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        step, inside = Builder(), []
        handed: tuple[int, ...] = ()
        for _ in range(blocks):
            latest = handed
            for _ in range(inner):
                latest = step.node(latest, (int(rng.integers(4, 9)),), float(rng.integers(1, 6)))
                inside += latest
            handed = step.node(latest, (1,), float(rng.integers(1, 6)))
        grad = step.node(handed, (1,), 1.0)
        for made in reversed(inside):
            grad = step.node((*grad, made), (1,), float(rng.integers(1, 6)))
        yield step.problem()
