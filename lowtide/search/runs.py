"""Schedules with recomputation as plain sequences: what they cost, in one pass over integer arrays.

A sequence of *runs* holds every node that makes or writes bytes at least once, and some again; views are not in it (`rewrite.remat` takes
them where they are read). A run reads the latest copy of each tensor, so a copy lives from the run that makes it to the last run that
reads it before the tensor is made anew: no lifetime is decided, all of them follow. A sequence is right if each run finds its inputs made,
and what a node repeats to read has not been written over since (`limits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import ArrayLike, NDArray

from lowtide.cost.memory import order_problem
from lowtide.ir.graph import Graph
from lowtide.ir.ops import is_view, repeatable
from lowtide.ir.problem import Ints, OrderProblem, Rows

Times = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RunProblem:
    """An ordering problem whose nodes may run more than once, and what a run costs. Its arrays are read-only."""

    problem: OrderProblem
    cost_us: Times  # [n] of one run
    is_view: NDArray[np.bool_]  # [n] makes no bytes and writes none: in no sequence
    repeatable: NDArray[np.bool_]  # [n] may run again
    limits: Rows  # by node: the nodes that write over what it reads; it is not repeated once one of them has run

    @classmethod
    def of(cls, graph: Graph, cost_us: Sequence[float], workspace_bytes: Sequence[int] | None = None, *, round_to: int = 1) -> RunProblem:
        """The problem of a graph whose nodes take `cost_us`; other arguments and errors as for `order_problem`."""
        problem = order_problem(graph, workspace_bytes, round_to=round_to)
        again = [repeatable(node) for node in graph.nodes]
        views = np.array([is_view(node) for node in graph.nodes], np.bool_)
        writers = {(before.storage, before.version): index for index, node in enumerate(graph.nodes) for before, _ in node.writes}
        rows = [
            sorted({writers[value.storage, value.version] for value in node.inputs if (value.storage, value.version) in writers} - {index})
            if node is not None
            else []
            for index, node in enumerate(again)
        ]
        makes = np.diff(problem.outputs_of.ptr) > 0
        return cls(
            problem=problem,
            cost_us=np.array(cost_us, np.float64),
            is_view=views,
            repeatable=np.array([node is not None for node in again], np.bool_) & ~views & makes,
            limits=Rows(
                np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32),
                np.array([each for row in rows for each in row], np.int32),
            ),
        )

    def runs_of(self, order: ArrayLike) -> Ints:
        """An order of all nodes as a sequence of runs: without the views."""
        steps = np.asarray(order, np.int32)
        return steps[~self.is_view[steps]]

    @cached_property
    def arrays(self) -> tuple[Any, ...]:
        """What `_play` wants to know, in its order."""
        problem = self.problem
        return (
            *problem.reads, *problem.outputs_of, *problem.takes, problem.take_output, problem.tensor_bytes, problem.made_bytes,
            problem.workspace_bytes, problem.kept, problem.producer,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Cost:
    """What a sequence costs."""

    footprint_bytes: NDArray[np.int64]  # by run, with what is resident
    peak_bytes: int
    time_us: float


def cost_of(problem: RunProblem, runs: Ints) -> Cost:
    """The footprint of a sequence, run by run, and its time."""
    footprint = _play(runs, *problem.arrays)
    footprint += problem.problem.resident_bytes
    peak = int(footprint.max(initial=problem.problem.resident_bytes))
    return Cost(footprint, peak, float(problem.cost_us[runs].sum()))


def first_wrong(problem: RunProblem, runs: Ints) -> int:
    """The first place at which a run lacks an input, repeats what may not be, or comes after what wrote over its inputs; -1 where none."""
    return int(_first_wrong(runs, problem.repeatable, *problem.problem.reads, *problem.limits, problem.problem.producer))


@njit(cache=True)
def _first_wrong(runs: Any, repeatable: Any, read_ptr: Any, read_ids: Any, limit_ptr: Any, limit_ids: Any, producer: Any) -> int:
    done = np.zeros(len(repeatable), np.bool_)
    for place in range(len(runs)):
        node = runs[place]
        for entry in range(read_ptr[node], read_ptr[node + 1]):
            maker = producer[read_ids[entry]]
            if maker >= 0 and not done[maker]:
                return place
        if done[node]:
            if not repeatable[node]:
                return place
            for entry in range(limit_ptr[node], limit_ptr[node + 1]):
                if done[limit_ids[entry]]:
                    return place
        done[node] = True
    return -1


@njit(cache=True)
def _play(
    runs: Any, read_ptr: Any, read_ids: Any, made_ptr: Any, made_ids: Any, take_ptr: Any, take_ids: Any, take_output: Any,
    tensor_bytes: Any, made_bytes: Any, workspace_bytes: Any, kept: Any, producer: Any,
) -> NDArray[np.int64]:  # fmt: skip
    """Footprint by run without what is resident. Backwards to find the last reader of each copy, then forwards."""
    count, m = len(runs), len(tensor_bytes)
    last = np.full(m, -1, np.int32)  # of the copy that a backward sweep is in: the run that reads it last
    dead = np.empty(count, np.int64)  # bytes that are let go after each run
    taken = np.zeros(count, np.int64)  # bytes that its first output finds in the memory of an input that dies there
    live = np.int64(0)
    for tensor in range(m):
        if kept[tensor]:
            last[tensor] = count
    for place in range(count - 1, -1, -1):
        node, freed = runs[place], np.int64(0)
        for entry in range(made_ptr[node], made_ptr[node + 1]):
            tensor = made_ids[entry]
            if last[tensor] < 0:
                freed += tensor_bytes[tensor]
            last[tensor] = -1
        for entry in range(take_ptr[node], take_ptr[node + 1]):
            if last[take_ids[entry]] < 0:
                taken[place] = tensor_bytes[take_output[node]]
                break
        for entry in range(read_ptr[node], read_ptr[node + 1]):
            tensor = read_ids[entry]
            if last[tensor] < 0:
                last[tensor] = place
                freed += tensor_bytes[tensor]
        dead[place] = freed
    for tensor in range(m):
        if producer[tensor] < 0 and last[tensor] >= 0:
            live += tensor_bytes[tensor]
    footprint = np.empty(count, np.int64)
    for place in range(count):
        node = runs[place]
        live += made_bytes[node]
        footprint[place] = live + workspace_bytes[node] - taken[place]
        live -= dead[place]
    return footprint
