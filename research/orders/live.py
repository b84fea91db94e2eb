"""The least bytes alive anywhere between two sets of nodes, by the minimum cuts that lowtide's proofs are made of."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lowtide.problems.order import OrderProblem
from lowtide.schedule.cuts import DONE, FREE, LATER, MinimumCut, cut_of


def least_live(problem: OrderProblem, done: NDArray[np.bool_], later: NDArray[np.bool_]) -> MinimumCut:
    """The least bytes alive after any downset that holds `done` [n] and nothing of `later` [n], with what is resident, and that downset.

    `done` must be closed under predecessors, and `later` under successors.
    """
    state = np.where(done, DONE, np.where(later, LATER, FREE)).astype(np.int8)
    cut = cut_of(problem, state, -1, -(2**62))
    return MinimumCut(cut.need_bytes + problem.resident_bytes, cut.downset)
