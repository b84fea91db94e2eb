"""What `place` does where nobody names a placer."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lowtide.base.solver_text import described
from lowtide.placement.base import Anytime, Placement, Placer, judged, unplaced
from lowtide.placement.exact import Exact
from lowtide.placement.greedy import Portfolio
from lowtide.placement.sections import cells, pairs
from lowtide.placement.strip import Strip, arena_bound_bytes
from lowtide.problems import Status
from lowtide.problems.placement import PlaceProblem, check_placement, components, subproblem_of

_MAX_LOOKS = 3_000_000_000  # of exact search (see `Exact`): some fifteen seconds
_FEW_LOOKS = 10_000_000  # where the gap is a matter of alignment alone


@dataclass(frozen=True)
class Auto(Anytime):
    """Simple placements; where none meets the bound, local search; where that does not help, exact search.

    Parts of a problem that share no step are solved one by one, and no further than the largest of them needs. On training steps of
    today's networks the first few placements mostly meet the bound, and that is all. The answer's `solver` is the one that found it.
    """

    max_moves: int = 100_000  # of local search
    max_nodes: int = 2_000_000  # of exact search
    max_seconds: float = math.inf  # buffers of a first pass that it cuts short are stacked upon the others; `stats` count them

    def answers(self, problem: PlaceProblem, capacity_bytes: int | None = None) -> Iterator[Placement]:
        """Smaller and smaller arenas, and higher and higher bounds."""
        bound_bytes, deadline = arena_bound_bytes(problem), time.monotonic() + self.max_seconds
        if capacity_bytes is not None and capacity_bytes < bound_bytes:
            yield unplaced(problem, self, capacity_bytes=capacity_bytes, bound_bytes=bound_bytes)
            return
        apart = components(problem)
        if len(apart) <= 1:
            yield from self._of_component(problem, capacity_bytes, deadline)
            return
        for placement in Portfolio(max_moves=0, max_seconds=self.max_seconds).answers(problem, capacity_bytes):
            yield placement
        if placement.arena_bytes > (bound_bytes if capacity_bytes is None else capacity_bytes):
            whole = _WholePlacement(problem, placement, capacity_bytes)
            yield from self._of_components(whole, apart, deadline)
            check_placement(problem, whole.placement.offsets, whole.placement.arena_bytes)  # each component was checked alone only

    def _of_components(self, whole: _WholePlacement, apart: list[NDArray[np.intp]], deadline: float) -> Iterator[Placement]:
        """The components that need more than is enough, those of the highest bounds first: what they need is enough for all others."""
        high = [each for each in apart if whole.top_bytes(each) > whole.enough_bytes]
        bounds = {int(each[0]): arena_bound_bytes(subproblem_of(whole.problem, each)) for each in high}
        for buffers in sorted(high, key=lambda each: -bounds[int(each[0])]):
            if not _left(deadline):
                return
            if whole.top_bytes(buffers) <= whole.enough_bytes:
                continue
            component = subproblem_of(whole.problem, buffers)
            limit = whole.enough_bytes if whole.capacity_bytes is not None or whole.enough_bytes > bounds[int(buffers[0])] else None
            for placement in self._of_component(component, limit, deadline):
                yield whole.learned(buffers, placement, self)
            if not placement.fits and whole.capacity_bytes is not None:
                return
            if not placement.fits:
                for placement in self._of_component(component, None, deadline):
                    yield whole.learned(buffers, placement, self)
            whole.enough_bytes = max(whole.enough_bytes, whole.top_bytes(buffers))

    def _of_component(self, problem: PlaceProblem, capacity_bytes: int | None, deadline: float) -> Iterator[Placement]:
        """One component: most moves of local search only where exact search, which is surer on small problems, leaves a gap."""
        known, strip = _BestKnown(capacity_bytes), Strip.of(problem)
        yield from known.better(Portfolio(self.max_moves // 4, _left(deadline)).answers(problem, capacity_bytes))
        if not known.is_done and self._can_search(problem) and _left(deadline):
            yield from self._searched(problem, strip, known, deadline)
        if not known.is_done and known.best is not None and known.gap_bytes >= strip.grain_bytes and _left(deadline):
            more = Portfolio(self.max_moves - self.max_moves // 4, _left(deadline))
            yield from known.better(more.improved(problem, known.best, capacity_bytes))

    def _can_search(self, problem: PlaceProblem) -> bool:
        """Whether exact search would do more than place a large problem once again."""
        return self.max_nodes > 0 and max(cells(problem), pairs(problem)) <= Exact.max_cells

    def _searched(self, problem: PlaceProblem, strip: Strip, known: _BestKnown, deadline: float) -> Iterator[Placement]:
        """By exact search. A bound that is no whole number of grains is much harder to meet than the next such number: that comes first."""
        ceiling_bytes = strip.ceiling_bytes(known.enough_bytes)
        if known.enough_bytes < ceiling_bytes < known.arena_bytes:
            yield from known.better(self._exact(_MAX_LOOKS, deadline).answers(problem, ceiling_bytes))
        if not known.is_done:
            max_looks = _MAX_LOOKS if known.gap_bytes >= strip.grain_bytes else _FEW_LOOKS
            yield from known.better(self._exact(max_looks, deadline).answers(problem, known.capacity_bytes))

    def _exact(self, max_looks: int, deadline: float) -> Exact:
        return Exact(max_nodes=self.max_nodes, max_seconds=_left(deadline), max_looks=max_looks)


class _BestKnown:
    """The best answer and the best bound of several placers, one after the other."""

    def __init__(self, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.best: Placement | None = None

    @property
    def is_done(self) -> bool:
        """Whether the question is answered: within the capacity, or proven the smallest, or proven not to fit."""
        if self.best is None or self.best.status in (Status.OPTIMAL, Status.INFEASIBLE):
            return True
        return self.capacity_bytes is not None and self.best.fits

    @property
    def arena_bytes(self) -> int:
        return self.best.arena_bytes if self.best is not None else 0

    @property
    def enough_bytes(self) -> int:
        """No arena needs to be smaller."""
        if self.capacity_bytes is not None:
            return self.capacity_bytes
        return self.best.lower_bound_bytes if self.best is not None else 0

    @property
    def gap_bytes(self) -> int:
        """By how much the best arena is larger than that."""
        return self.arena_bytes - self.enough_bytes

    def better(self, answers: Iterator[Placement]) -> Iterator[Placement]:
        """What is known after each of a placer's answers, until the question is answered."""
        for placement in answers:
            self.best = placement if self.best is None else self._joined(self.best, placement)
            yield self.best
            if self.is_done:
                return

    def _joined(self, best: Placement, placement: Placement) -> Placement:
        bound_bytes = max(best.lower_bound_bytes, placement.lower_bound_bytes)
        stats = {**best.stats, **placement.stats}
        if placement.offsets and (not best.offsets or placement.arena_bytes < best.arena_bytes):
            best = placement
        status = judged(best.arena_bytes, bound_bytes, self.capacity_bytes)
        return replace(best, lower_bound_bytes=bound_bytes, status=status, stats=stats)


class _WholePlacement:
    """A problem of several components, and what is known of it so far."""

    def __init__(self, problem: PlaceProblem, placement: Placement, capacity_bytes: int | None) -> None:
        self.problem, self.placement, self.capacity_bytes = problem, placement, capacity_bytes
        self.offsets = np.array(placement.offsets, np.int64)
        self.enough_bytes = placement.lower_bound_bytes if capacity_bytes is None else capacity_bytes

    def top_bytes(self, buffers: NDArray[np.intp]) -> int:
        return int((self.offsets[buffers] + self.problem.size_bytes[buffers]).max(initial=0))

    def learned(self, buffers: NDArray[np.intp], placement: Placement, placer: Auto) -> Placement:
        """What is known with another answer for one component."""
        if placement.offsets and placement.arena_bytes < self.top_bytes(buffers):
            self.offsets[buffers] = placement.offsets
        arena_bytes = int((self.offsets + self.problem.size_bytes).max(initial=0))
        bound_bytes = max(self.placement.lower_bound_bytes, placement.lower_bound_bytes)
        status = judged(arena_bytes, bound_bytes, self.capacity_bytes)
        stats = {**self.placement.stats, **placement.stats}
        self.placement = Placement(tuple(self.offsets.tolist()), arena_bytes, bound_bytes, status, described(placer), stats)
        return self.placement


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)


AUTO = Auto()


def place(problem: PlaceProblem, placer: Placer = AUTO, capacity_bytes: int | None = None) -> Placement:
    """Addresses for a problem's buffers, by `placer`; in the smallest arena that can be found and proven where it is left out.

    With a capacity, in any arena that fits it.
    """
    return placer.place(problem, capacity_bytes)
