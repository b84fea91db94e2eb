"""A lower bound on the peak of every order, proven in one pass over the problem."""

from __future__ import annotations

import numpy as np

from lowtide.problems.order import Bytes, OrderProblem


def lower_bound_bytes(problem: OrderProblem) -> int:
    """The most that any node, the first step, or the last step needs in every order, with what is resident.

    A node needs what it reads and makes, its workspace, and what is kept from the start, less the memory that it may at best take over.
    The first step runs a node without predecessors beside all that lives at the start, the last step one without successors beside
    all that is kept.
    """
    if problem.node_count == 0:
        return problem.resident_bytes + problem.start_bytes
    size, is_given = problem.tensor_bytes, problem.producer < 0
    own_bytes = problem.made_bytes + problem.workspace_bytes - _taken_bytes(problem)
    always = problem.kept & is_given
    node_bytes = own_bytes + problem.sum_by_row(problem.reads, np.where(always, 0, size)) + size[always].sum()
    # What is alive at the first step is all that lives at the start, which holds whatever a first node can read.
    first_bytes = problem.start_bytes + own_bytes[np.diff(problem.pred_ptr) == 0].min()
    # At the last step all that is kept is alive, beside what its node reads or makes and nobody keeps.
    passing = problem.sum_by_row(problem.outputs_of, np.where(problem.kept, size, 0))
    last_bytes = size[problem.kept].sum() + own_bytes - passing + problem.sum_by_row(problem.reads, np.where(problem.kept, 0, size))
    last_bytes = last_bytes[np.diff(problem.succs.ptr) == 0].min()
    return problem.resident_bytes + int(max(node_bytes.max(), first_bytes, last_bytes))


def _taken_bytes(problem: OrderProblem) -> Bytes:
    """[n] the most that each node can take over: the size of its first output where some candidate may die at it."""
    candidates = problem.sum_by_row(problem.takes, (~problem.kept).astype(np.int64))
    taken_bytes = np.zeros(problem.node_count, np.int64)
    taken_bytes[candidates > 0] = problem.tensor_bytes[problem.take_output[candidates > 0]]
    return taken_bytes
