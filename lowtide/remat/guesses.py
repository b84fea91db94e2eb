"""First guesses of what to keep: the best choices between bytes and time (`remat.bound`) at the moment where an order stands highest.

What such a choice keeps is made dear to eviction, and the rest cheap.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lowtide.problems.order import Ints
from lowtide.remat.archive import Recipe
from lowtide.remat.bound import Crossing
from lowtide.remat.cost import cost_of
from lowtide.remat.eviction import Bias, ScoreWeights
from lowtide.remat.problem import RematProblem
from lowtide.remat.pruning import prompt

_DEAR = 100.0  # times as dear as it looks
_GUESS_RULES = (ScoreWeights(), ScoreWeights(steps_power=0.4))
_GUESSES_NEAR = 2  # corners that are tried at a limit


class Guesses:
    """Of one problem without links, along one order."""

    def __init__(self, problem: RematProblem, order: Ints) -> None:
        self._order, ready = order, prompt(problem, order)
        self._moment = Crossing.of(problem, int(ready[cost_of(problem, ready).footprint_bytes.argmax()]))
        self._beside_bytes = problem.problem.resident_bytes + self._moment.needs_bytes

    def within(self, limit_bytes: int) -> Iterator[Recipe]:
        """Recipes for a limit, the most promising first: those of the corners that keep nearest to what has room."""
        room_bytes = limit_bytes - self._beside_bytes
        for corner in sorted(self._moment.corners, key=lambda each: abs(each.held_bytes - room_bytes))[:_GUESSES_NEAR]:
            for rule in _GUESS_RULES:
                yield Recipe(self._order, rule, Bias(np.where(corner.kept, _DEAR, 1.0), np.ones(len(corner.kept))))
