"""From an order to the buffers that its steps need: what a placer is asked to give addresses to.

Each tensor is a buffer that lives as `simulate` says, and each node's workspace is one that lives for the node's step. A node that works
in the memory of an input that dies there needs its result at the same address: such tensors, one after the other, are one buffer that
lives from the start of the first to the end of the last. As each ends where the next one starts, and all are of one size, this joins
lives without adding bytes at any step: the most bytes alive are the order's peak, less what is resident.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from lowtide.cost.memory import Footprint, checked_order, simulate
from lowtide.problems.order import Ints, OrderProblem
from lowtide.problems.placement import PlaceProblem


@dataclass(frozen=True, eq=False)
class Buffers:
    """The buffers of an order, and which of them holds what."""

    problem: PlaceProblem
    of_tensor: Ints  # [m] the buffer that holds each tensor
    of_workspace: Ints  # [n] the buffer that is each node's workspace, -1 where it needs none


def place_problem(problem: OrderProblem, order: ArrayLike, *, align_bytes: int = 1) -> PlaceProblem:
    """The buffers of `order`, to be placed at multiples of `align_bytes`; what the caller holds throughout is not among them.

    Raises CheckError unless `order` is a topological order of the problem's nodes.
    """
    return order_buffers(problem, order, align_bytes=align_bytes).problem


def order_buffers(problem: OrderProblem, order: ArrayLike, *, align_bytes: int = 1) -> Buffers:
    """The same with the way back, from tensors and nodes to buffers.

    Buffers come in the order of tensors, then of nodes with workspaces; their lives are counted in steps of `order`.
    """
    footprint = simulate(problem, order)
    first = _first_of_chain(problem, checked_order(problem, order), footprint)
    roots, of_tensor = np.unique(first, return_inverse=True)
    end = footprint.lifetimes.end[roots].astype(np.int64)
    np.maximum.at(end, of_tensor, footprint.lifetimes.end)
    working = np.flatnonzero(problem.workspace_bytes)
    of_workspace = np.full(problem.node_count, -1, np.int32)
    of_workspace[working] = len(roots) + np.arange(len(working))
    step_of = np.empty(problem.node_count, np.int64)
    step_of[np.asarray(order, np.int64)] = np.arange(problem.node_count)
    placing = PlaceProblem.of(
        np.concatenate([problem.tensor_bytes[roots], problem.workspace_bytes[working]]),
        np.concatenate([footprint.lifetimes.start[roots], step_of[working]]),
        np.concatenate([end, step_of[working] + 1]),
        names=[*(f"tensor{each}" for each in roots.tolist()), *(f"workspace{each}" for each in working.tolist())],
        align_bytes=align_bytes,
    )
    return Buffers(placing, of_tensor.astype(np.int32), of_workspace)


def _first_of_chain(problem: OrderProblem, order: Ints, footprint: Footprint) -> Ints:
    """[m] by tensor: the one whose memory it lives in, through all reuses; itself where it takes over none."""
    first = np.arange(problem.tensor_count, dtype=np.int32)
    for node in order[footprint.reuses[order] >= 0].tolist():
        entries = slice(problem.take_ptr[node], problem.take_ptr[node + 1])
        (taken,) = problem.take_ids[entries][problem.take_slots[entries] == footprint.reuses[node]]
        first[problem.take_output[node]] = first[taken]
    return first
