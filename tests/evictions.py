"""What eviction makes of some small problems, the same each time."""

from __future__ import annotations

import numpy as np

from lowtide.remat.cost import cost_of, first_wrong
from lowtide.remat.eviction import ScoreWeights
from tests.chains import in_order
from tests.optimum import small_steps
from tests.sequences import RULES, evict, stored_chain


def evicted() -> list[tuple[list[int], int, float, int]]:
    """Sequences, their peaks and times, and where they are wrong: first without swapping, then with it by each rule."""
    problems = [(problem, ScoreWeights(), 1) for problem in small_steps(4)] + [(stored_chain(6), rule, 200) for rule in RULES]
    found = []
    for problem, rule, less_bytes in problems:
        order = in_order(problem)
        made = evict(problem, order, cost_of(problem, order).peak_bytes - less_bytes, rule)
        sequence = np.zeros(0, np.int32) if made is None else made.sequence
        cost = cost_of(problem, sequence)
        found.append((sequence.tolist(), cost.peak_bytes, cost.time_us, first_wrong(problem, sequence)))
    return found
