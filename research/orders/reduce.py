"""Reductions: problems made smaller without losing their least peak, each with the inverse that turns orders back.

    reduced = DropZeroBytes().apply(problem)
    order = reduced.inverse.expand(solver.solve(reduced.problem).order)

A node of a smaller problem may stand for a run of nodes. What it makes is then what outlives the run, and its `workspace_bytes` is what
the run needs beyond that, a negative number where some of what it makes comes after its peak.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from lowtide.base.kernels import kernel
from lowtide.problems.order import Ints, OrderProblem, Rows, Task, frozen
from lowtide.schedule.base import Schedule, Solver, scheduled
from lowtide.schedule.exact import Exact


@dataclass(frozen=True, eq=False)
class Inverse:
    """The way back: each node of the smaller problem is a run of nodes of the larger one, and some nodes are in no run."""

    larger: OrderProblem
    runs: Rows  # by node of the smaller problem

    def expand(self, order: ArrayLike) -> Ints:
        """An order of the larger problem: run after run, and each node that is in no run as soon as its predecessors have run."""
        kept = self.runs.chosen(np.asarray(order, np.int32)).ids
        is_dropped = np.ones(self.larger.node_count, np.bool_)
        is_dropped[kept] = False
        return np.asarray(_with_dropped(kept, is_dropped, self.larger.pred_ptr, *self.larger.succs), np.int32)


@dataclass(frozen=True, eq=False)
class Reduced:
    """A smaller problem of the same least peak."""

    problem: OrderProblem
    inverse: Inverse


class Reduction(Protocol):
    """A way to make problems smaller: a frozen dataclass whose fields are its settings."""

    def apply(self, problem: OrderProblem) -> Reduced:
        """A problem of which each optimal order expands to one of `problem`."""
        ...


@dataclass(frozen=True)
class DropZeroBytes:
    """Drops nodes that make no bytes, need none and free none, like views: their edges lead past them.

    A node stays where it may free a tensor, and where leading edges past it would add more than `spare` of them.
    """

    spare: int = 8

    def apply(self, problem: OrderProblem) -> Reduced:
        """The problem without such nodes, and without tensors of no bytes."""
        preds = [set(row) for row in split(problem.preds)]
        succs = [set(row) for row in split(problem.succs)]
        readers = [set(row) for row in split(problem.readers)]
        reads, left = split(problem.reads), []
        size, is_kept = problem.tensor_bytes.tolist(), problem.kept.tolist()
        is_empty = ((problem.made_bytes == 0) & (problem.workspace_bytes == 0)).tolist()
        for node in range(problem.node_count):
            added = len(preds[node]) * len(succs[node]) - len(preds[node]) - len(succs[node])
            frees = any(size[tensor] and not is_kept[tensor] and readers[tensor].isdisjoint(succs[node]) for tensor in reads[node])
            if not is_empty[node] or frees or added > self.spare:
                left.append(node)
                continue
            for tensor in reads[node]:
                readers[tensor].discard(node)
            for pred in preds[node]:
                succs[pred].discard(node)
                succs[pred] |= succs[node]
            for succ in succs[node]:
                preds[succ].discard(node)
                preds[succ] |= preds[node]
        makes, takes = split(problem.outputs_of), split(problem.takes)
        first = problem.take_output.tolist()
        return rebuild(
            problem,
            [Group(problem.names[node], [node], makes[node], reads[node], preds[node], takes[node], first[node]) for node in left],
            problem.made_bytes[left] + problem.workspace_bytes[left],
        )


@dataclass(frozen=True)
class Reducing:
    """Solves by `inner` what `reductions` leave of a problem. What that proves of the smaller problem is true of the larger."""

    reductions: tuple[Reduction, ...] = (DropZeroBytes(),)
    inner: Solver = field(default_factory=Exact)

    def solve(self, problem: OrderProblem) -> Schedule:
        """The expanded order; `nodes` in its stats counts those of the smallest problem."""
        smaller, inverses = problem, list[Inverse]()
        for reduction in self.reductions:
            reduced = reduction.apply(smaller)
            smaller, inverses = reduced.problem, [reduced.inverse, *inverses]
        schedule = self.inner.solve(smaller)
        order: ArrayLike = schedule.order
        for inverse in inverses:
            order = inverse.expand(order)
        stats: Mapping[str, int] = {**schedule.stats, "nodes": smaller.node_count}
        return scheduled(problem, order, self, bound_bytes=schedule.lower_bound_bytes, stats=stats)


class Group(NamedTuple):
    """Nodes of a problem that are one node of a smaller one."""

    name: str
    run: Sequence[int]  # its nodes, in the order they run; a group goes by the last of them
    makes: Sequence[int]  # tensors
    reads: Sequence[int]
    before: Collection[int]  # groups
    takes: Sequence[int]  # tensors whose memory `first` may take over
    first: int  # of the tensors that it makes, -1 where nothing may be taken over


def rebuild(problem: OrderProblem, groups: Sequence[Group], need_bytes: ArrayLike, kept: Collection[int] | None = None) -> Reduced:
    """The problem of `groups` of nodes, where group i needs `need_bytes[i]` beside what is alive before it; sizes of 0 are left out.

    Of the tensors that are there, those of `kept` live to the end, the problem's own where it is left out.
    """
    size = problem.tensor_bytes.tolist()
    seen = {tensor for group in groups for tensor in (*group.makes, *group.reads) if size[tensor]}
    if kept is None:
        kept = set(np.flatnonzero(problem.kept).tolist())
        seen.update(tensor for tensor in kept if problem.producer[tensor] < 0 and size[tensor])
    tensors = sorted(seen)
    position = {tensor: index for index, tensor in enumerate(tensors)}
    index_of = {group.run[-1]: index for index, group in enumerate(groups)}
    smaller = OrderProblem.of(
        [size[tensor] for tensor in tensors],
        [_task(group, position, index_of) for group in groups],
        kept=[position[tensor] for tensor in tensors if tensor in kept],
        resident_bytes=problem.resident_bytes,
    )
    # `of` refuses a negative workspace, and rightly so from a user.
    workspace_bytes = np.asarray(need_bytes, np.int64) - smaller.made_bytes
    ptr = np.concatenate([[0], np.cumsum([len(group.run) for group in groups])]).astype(np.int32)
    ids = np.fromiter((node for group in groups for node in group.run), np.int32)
    return Reduced(replace(smaller, workspace_bytes=frozen(workspace_bytes)), Inverse(problem, Rows(ptr, ids)))


def _task(group: Group, position: Mapping[int, int], index_of: Mapping[int, int]) -> Task:
    """A group as a task over the tensors that have a place."""
    tensors = sorted((tensor for tensor in group.makes if tensor in position), key=lambda tensor: (tensor != group.first, tensor))
    return Task(
        name=group.name,
        makes=tuple(position[tensor] for tensor in tensors),
        reads=tuple(position[tensor] for tensor in group.reads if tensor in position),
        after=tuple(sorted(index_of[pred] for pred in group.before)),
        takes=tuple((position[tensor], slot) for slot, tensor in enumerate(group.takes) if tensor in position),
    )


def split(rows: Rows) -> list[list[int]]:
    """Rows as lists."""
    ids, ptr = rows.ids.tolist(), rows.ptr.tolist()
    return [ids[start:end] for start, end in pairwise(ptr)]


@kernel
def _with_dropped(kept: Any, is_dropped: Any, pred_ptr: Any, succ_ptr: Any, succ_ids: Any) -> Any:
    """`kept` in their order, with each dropped node as soon as it can run."""
    n = len(is_dropped)
    order, step, ran, following = np.empty(n, np.int32), 0, 0, 0
    waits = pred_ptr[1:] - pred_ptr[:-1]
    for node in range(n):
        if is_dropped[node] and waits[node] == 0:
            order[step], step = node, step + 1
    while True:
        while ran < step:  # what the last nodes made ready
            node, ran = order[ran], ran + 1
            for entry in range(succ_ptr[node], succ_ptr[node + 1]):
                succ = succ_ids[entry]
                waits[succ] -= 1
                if is_dropped[succ] and waits[succ] == 0:
                    order[step], step = succ, step + 1
        if following == len(kept):
            return order
        order[step], step, following = kept[following], step + 1, following + 1
