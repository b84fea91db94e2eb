"""A search for addresses that always has an answer: the solver's last one, also when it is interrupted, or else a simple placement."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.cli.interrupt import until_interrupted
from lowtide.placement.base import Placement, Placer, answers
from lowtide.placement.greedy import Greedy
from lowtide.placement.warm_up import warm_up
from lowtide.plan.summary import bytes_text
from lowtide.problems.placement import PlaceProblem

SIMPLE: Mapping[str, Greedy] = {"first fit, as they start": Greedy("start"), "first fit, by size": Greedy("size")}
_HURRIED_SECONDS = 0.2  # for both of them together, where the search was to end soon


@dataclass(frozen=True)
class PlaceOutcome:
    """The best answer of a search, and what it took."""

    best: Placement
    simple: Mapping[str, Placement]  # what anybody would try first, for comparison; less those that there was no time for
    capacity_bytes: int | None  # that was asked for
    seconds: float  # of the search alone, without loading or compiling its kernels
    interrupted: bool

    @property
    def has_offsets(self) -> bool:
        """Whether a placement was found, be it within the capacity or not."""
        return bool(self.best.offsets) or self.best.fits  # without buffers there are no offsets either

    @property
    def gap(self) -> float | None:
        """How much of the arena might at most be saved by another placement, from 0 to 1; 0 where it is proven smallest."""
        if not self.has_offsets:
            return None
        return (self.best.arena_bytes - self.best.lower_bound_bytes) / max(self.best.arena_bytes, 1)


def search(problem: PlaceProblem, solver: Placer, capacity_bytes: int | None = None) -> PlaceOutcome:
    """All that `solver` finds until it is done or interrupted."""
    searched = until_interrupted(lambda: warm_up(solver), answers(problem, solver, capacity_bytes), _interrupted_text)
    hurried = searched.interrupted or getattr(solver, "max_seconds", math.inf) < math.inf
    deadline = time.monotonic() + (_HURRIED_SECONDS if hurried else math.inf)
    simple = {label: placer.place_by(deadline, problem, capacity_bytes) for label, placer in SIMPLE.items()}
    best = searched.last if searched.last is not None else min(simple.values(), key=lambda found: found.arena_bytes)
    whole = {label: found for label, found in simple.items() if "stacked" not in found.stats}
    return PlaceOutcome(best, whole, capacity_bytes, searched.seconds, searched.interrupted)


def _interrupted_text(answer: Placement) -> str:
    return f"arena {bytes_text(answer.arena_bytes)}, none is smaller than {bytes_text(answer.lower_bound_bytes)}"
