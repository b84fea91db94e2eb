"""Random ordering problems, small enough for brute force, and the slow ways to play and order them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from lowtide.problems.order import OrderProblem, Task

unhurried = settings(deadline=None)  # a first call may compile kernels
ORDER_FILES = Path(__file__).parent / "data" / "order"
SIZES = st.sampled_from([0, 1, 2, 2, 3, 8, 8])  # few, so that reuses are common


@dataclass(frozen=True)
class Case:
    """What a problem is built from, so that a test can look at it without the arrays."""

    tensor_bytes: tuple[int, ...]
    tasks: tuple[Task, ...]
    kept: frozenset[int]
    resident_bytes: int

    @property
    def problem(self) -> OrderProblem:
        return OrderProblem.of(self.tensor_bytes, self.tasks, kept=self.kept, resident_bytes=self.resident_bytes)

    def preds(self, node: int) -> set[int]:
        task = self.tasks[node]
        made = {maker for maker, other in enumerate(self.tasks) if set(other.makes) & set(task.reads)}
        return made | set(task.after)

    def readers(self, tensor: int) -> set[int]:
        return {node for node, task in enumerate(self.tasks) if tensor in task.reads}


@st.composite
def cases(draw: st.DrawFn, max_nodes: int = 7) -> Case:
    """Several outputs and none, zero bytes, workspaces, reuses, donated and kept tensors, control edges, indices in any order."""
    sizes = draw(st.lists(SIZES, max_size=3))
    tasks: list[Task] = []
    for _ in range(draw(st.integers(0, max_nodes))):
        reads = draw(st.permutations(range(len(sizes))))[: draw(st.integers(0, 3))] if sizes else []
        made = draw(st.lists(SIZES, max_size=2))
        alike = [tensor for tensor in reads if made and sizes[tensor] == made[0]]
        slots = draw(st.permutations(range(5)))
        after = draw(st.sets(st.integers(0, len(tasks) - 1), max_size=2)) if tasks else set()
        tasks.append(
            Task(
                name=draw(st.sampled_from(["add", "mul", "é \ud800", ""])),
                makes=tuple(range(len(sizes), len(sizes) + len(made))),
                reads=tuple(reads),
                after=tuple(sorted(after)),
                workspace_bytes=draw(st.sampled_from([0, 0, 5])),
                takes=tuple(zip(alike, slots, strict=False)) if draw(st.booleans()) else (),
            )
        )
        sizes += made
    kept = draw(st.frozensets(st.sampled_from(range(len(sizes))))) if sizes else frozenset()
    return Case(tuple(sizes), _relabelled(tasks, draw(st.permutations(range(len(tasks))))), kept, draw(st.sampled_from([0, 100])))


def _relabelled(tasks: list[Task], index_of: list[int]) -> tuple[Task, ...]:
    moved = {index_of[node]: replace(task, after=tuple(index_of[pred] for pred in task.after)) for node, task in enumerate(tasks)}
    return tuple(moved[index] for index in range(len(tasks)))


def topological_orders(case: Case) -> Iterator[tuple[int, ...]]:
    """Every one of them."""
    preds = [case.preds(node) for node in range(len(case.tasks))]

    def extend(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(order) == len(preds):
            yield order
        for node in range(len(preds)):
            if node not in order and preds[node] <= set(order):
                yield from extend((*order, node))

    return extend(())


def slow_footprint(case: Case, order: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Footprint by step and reuse by node, each step from nothing but the definition."""
    when = {node: step for step, node in enumerate(order)}
    maker = {tensor: node for node, task in enumerate(case.tasks) for tensor in task.makes}
    last_read = {tensor: max((when[node] for node in case.readers(tensor)), default=-1) for tensor in range(len(case.tensor_bytes))}
    footprint, reuses = [], [-1] * len(order)
    for step, node in enumerate(order):
        task = case.tasks[node]
        before = [tensor for tensor in last_read if tensor not in maker or when[maker[tensor]] < step]
        alive = [tensor for tensor in before if tensor in case.kept or last_read[tensor] >= step]
        total = case.resident_bytes + sum(case.tensor_bytes[tensor] for tensor in (*alive, *task.makes)) + task.workspace_bytes
        dying = [(tensor, slot) for tensor, slot in task.takes if tensor not in case.kept and last_read[tensor] == step]
        if dying:
            total -= case.tensor_bytes[task.makes[0]]
            reuses[node] = dying[0][1]
        footprint.append(total)
    return footprint, reuses


def slow_peak(case: Case, order: tuple[int, ...]) -> int:
    at_start = sum(
        nbytes
        for tensor, nbytes in enumerate(case.tensor_bytes)
        if not any(tensor in task.makes for task in case.tasks) and (tensor in case.kept or case.readers(tensor))
    )
    return max(slow_footprint(case, order)[0], default=case.resident_bytes + at_start)


def least_peak(case: Case) -> int:
    """The least peak of all orders, from nothing but the definition: by recursion over sets of nodes that have run."""
    nodes = range(len(case.tasks))
    preds, readers = [case.preds(node) for node in nodes], [case.readers(tensor) for tensor in range(len(case.tensor_bytes))]
    maker = {tensor: node for node in nodes for tensor in case.tasks[node].makes}
    known: dict[frozenset[int], int] = {frozenset(nodes): 0}

    def alive(done: frozenset[int]) -> set[int]:
        return {
            tensor
            for tensor in range(len(case.tensor_bytes))
            if (tensor not in maker or maker[tensor] in done) and (tensor in case.kept or readers[tensor] - done)
        }

    def needed(node: int, done: frozenset[int]) -> int:
        task = case.tasks[node]
        total = sum(case.tensor_bytes[tensor] for tensor in alive(done) | set(task.makes)) + task.workspace_bytes
        taken = any(tensor not in case.kept and readers[tensor] - done == {node} for tensor, _ in task.takes)
        return total - case.tensor_bytes[task.makes[0]] if taken else total

    def least(done: frozenset[int]) -> int:
        if done not in known:
            ready = [node for node in nodes if node not in done and preds[node] <= done]
            known[done] = min(max(needed(node, done), least(done | {node})) for node in ready)
        return known[done]

    start = sum(case.tensor_bytes[tensor] for tensor in alive(frozenset()))
    return case.resident_bytes + (least(frozenset()) if case.tasks else start)


def same(first: OrderProblem, second: OrderProblem) -> bool:
    """Whether two problems are equal in all that they hold, types included."""
    return all(
        type(one) is type(two) and np.array_equal(one, two) and getattr(one, "dtype", None) == getattr(two, "dtype", None)
        for one, two in zip(vars(first).values(), (vars(second)[field] for field in vars(first)), strict=True)
    )
