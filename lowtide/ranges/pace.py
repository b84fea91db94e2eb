"""How long sequences take at any point of a range: what each node takes there, as often as it runs, and what is waited for copies.

So a sequence takes at each point what it takes where that point is planned alone. Waits follow from all that runs at once: they are known
where operators were measured, and in between on the line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.cost.measures import Measures
from lowtide.problems.order import Ints
from lowtide.remat.range_problem import RangedProblem

Times = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Pace:
    """Of one sequence."""

    runs: Times  # [nodes] how often each runs
    waits_us: Times  # [k] what is waited at the points of the measures' grid

    @classmethod
    def of(cls, problem: RangedProblem, sequence: Ints) -> Pace:
        """Of a sequence of a problem whose nodes' times are known."""
        measures, nodes = problem.measures, problem.structure.problem.node_count
        runs = np.bincount(sequence[sequence < nodes], minlength=nodes).astype(np.float64)
        waits_us = np.zeros(len(measures.node_us))
        if problem.links is not None:
            waits_us = problem.costs([sequence], measures.grid.points)[0, :, 1] - measures.node_us @ runs
        return cls(runs, waits_us)


def paces_at(measures: Measures, point: Mapping[str, int], runs: Times, waits_us: Times) -> Times:
    """[m] microseconds of sequences of one problem, given how often they run each node [m, n] and what they wait for [m, k].

    Raises ShapeError for a wrong point. A product of floats would wait for other threads.
    """
    us: Times = np.einsum("mn,n->m", runs, measures.us_at(point)) + np.einsum("mk,k->m", waits_us, measures.grid.weights(point))
    return us
