"""A placement to begin with: first fit, the largest first."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from lowtide.ir.placement import FREE, Ints, PlaceProblem


def first_fit(problem: PlaceProblem) -> Ints:
    """Offsets of each buffer: the lowest that are free when its turn comes, by size, then life, then number; fixed ones come first."""
    order = np.lexsort((problem.start - problem.end, -problem.size_bytes, problem.fixed_bytes == FREE))
    offsets = np.where(problem.fixed_bytes == FREE, 0, problem.fixed_bytes)
    busy = (problem.size_bytes > 0) & (problem.start < problem.end)
    order = order[busy[order]]
    _fit(order, problem.size_bytes, problem.start, problem.end, problem.align_bytes, problem.fixed_bytes, offsets)
    return offsets


@njit(cache=True)
def _fit(order: Any, size: Any, start: Any, end: Any, align: Any, fixed: Any, offsets: Any) -> None:
    done = np.empty(len(order), np.int64)  # those that lie, by offset
    for count in range(len(order)):
        buffer = order[count]
        if fixed[buffer] == FREE:
            offset = 0
            for at in range(count):
                other = done[at]
                if offsets[other] >= offset + size[buffer]:
                    break
                if start[other] < end[buffer] and start[buffer] < end[other] and offsets[other] + size[other] > offset:
                    offset = -(-(offsets[other] + size[other]) // align[buffer]) * align[buffer]
            offsets[buffer] = offset
        at = np.searchsorted(offsets[done[:count]], offsets[buffer], "right")
        done[at + 1 : count + 1] = done[at:count].copy()
        done[at] = buffer
