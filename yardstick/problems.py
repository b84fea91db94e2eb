"""Instances as lowtide's own problems, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lowtide.problems.order import Ints, OrderProblem, Rows, Task
from lowtide.problems.placement import PlaceProblem
from lowtide.remat.entries import EntryKind
from lowtide.remat.problem import Links, RematProblem
from research.addresses.spaces import Space, SpacedProblem

Instance = dict[str, Any]


def order_problem(graph: Instance) -> OrderProblem:
    """The ordering problem of a graph; with a cost and times of copies or without."""
    count = len(graph["makes"])
    after, takes = (graph.get(name) or [[]] * count for name in ("after", "takes"))
    tasks = [
        Task(
            name=str(node),
            makes=tuple(graph["makes"][node]),
            reads=tuple(graph["reads"][node]),
            after=tuple(after[node]),
            workspace_bytes=(graph.get("workspace_bytes") or [0] * count)[node],
            takes=tuple((tensor, 0) for tensor in takes[node]),
        )
        for node in range(count)
    ]
    return OrderProblem.of(graph["bytes"], tasks, kept=graph.get("kept", ()), resident_bytes=graph.get("resident_bytes", 0))


def remat_problem(graph: Instance, *, copies: bool = False) -> RematProblem:
    """The problem of sequences, with copies to the host or without. Its microseconds are the instance's units."""
    problem = order_problem(graph)
    once = np.zeros(problem.node_count, np.bool_)
    once[graph.get("once", [])] = True
    store, load = graph.get("store"), graph.get("load")
    links = None
    if copies and store and load:
        storable = np.array([each is not None for each in store], np.bool_)
        links = Links(storable, *(np.array([each or 0 for each in times], np.float64) for times in (store, load)))
    return RematProblem(
        problem=problem,
        cost_us=np.array(graph["cost"], np.float64),
        is_view=np.zeros(problem.node_count, np.bool_),
        repeatable=~once & (np.diff(problem.outputs_of.ptr) > 0),
        limits=Rows.of(graph.get("until") or [[]] * problem.node_count),
        links=links,
    )


def place_problem(buffers: Instance) -> PlaceProblem:
    """The buffers of a placement, of one space or several."""
    return PlaceProblem.of(buffers["size"], buffers["start"], buffers["end"], align_bytes=buffers.get("align", 1))


def spaced_problem(buffers: Instance) -> SpacedProblem:
    """The buffers and their spaces."""
    spaces = [Space(str(index), capacity) for index, capacity in enumerate(buffers["spaces"])]
    return SpacedProblem.of(place_problem(buffers), spaces, buffers["allowed"], buffers["benefit"])


def sequence_of(problem: RematProblem, sequence: Ints) -> list[Any]:
    """A sequence as answers hold it: a run is its node's number."""
    entries = [problem.codes.read(int(entry)) for entry in sequence]
    return [which if kind is EntryKind.RUN else [kind.name.lower(), which] for kind, which in entries]


def coded(problem: RematProblem, sequence: Sequence[Any]) -> Ints:
    """The same the other way."""
    make = {"store": problem.codes.store, "drop": problem.codes.drop, "load": problem.codes.load}
    return np.array([each if isinstance(each, int) else make[each[0]](each[1]) for each in sequence], np.int32)
