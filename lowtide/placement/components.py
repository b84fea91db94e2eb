"""A problem taken apart where nothing is alive: the components share no step, so each is placed by itself, over the same bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lowtide.problems.placement import PlaceProblem


def components(problem: PlaceProblem) -> list[NDArray[np.intp]]:
    """The buffers of each component, by time; those that need no bytes are in none."""
    needed = np.flatnonzero((problem.size_bytes > 0) & (problem.start < problem.end))
    if not len(needed):
        return []
    order = needed[np.argsort(problem.start[needed], kind="stable")]
    ended = np.maximum.accumulate(problem.end[order])
    cuts = np.flatnonzero(problem.start[order][1:] >= ended[:-1]) + 1
    return [np.sort(each) for each in np.split(order, cuts)]


def subproblem_of(problem: PlaceProblem, buffers: NDArray[np.intp]) -> PlaceProblem:
    """The problem of some of a problem's buffers."""
    return PlaceProblem(
        names=tuple(problem.names[each] for each in buffers.tolist()),
        size_bytes=problem.size_bytes[buffers],
        start=problem.start[buffers],
        end=problem.end[buffers],
        align_bytes=problem.align_bytes[buffers],
        fixed_bytes=problem.fixed_bytes[buffers],
    )
