"""The exact placer: placements proven to need the smallest arena, or a gap that is proven."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from numpy.typing import ArrayLike

from lowtide.placement.base import Placement, placed
from lowtide.placement.exact.question import CapacityQuestion, Switches
from lowtide.placement.exact.search import NO, YES
from lowtide.placement.exact.sections import cells, cut, pairs
from lowtide.placement.greedy import Greedy
from lowtide.problems.placement import PlaceProblem
from lowtide.problems.status import Status

_FIRST = Greedy("pressure")
_QUOTA = 16_000  # nodes that a question gets before it is put aside, at first
_CHUNK_LOOKS = 10_000_000  # between two looks at the clock


@dataclass(frozen=True)
class Exact:
    """Canonical branch and bound over floors, section by section: closes in on the smallest arena from both sides.

    Effort is counted in nodes: states that the search entered. A problem gets the fewer of them the more there is to look at in each: at
    most `max_looks` over the number of pairs of a buffer and a section of its life (about 5 ns each). Problems with more than `max_cells`
    such pairs, or pairs of buffers that meet, are not searched. The seconds are a cap. Stopped early, it answers with the best placement
    so far and the bound that it proved; asked for a capacity that it found nothing for, with one that a heuristic found.

    Each technique may be turned off: answers stay right, and take longer. `canonical`: a buffer lies at its floor or rests on another,
    nowhere between. `inference`: sections must have room for all that is not placed. `lifting`: a buffer that cannot lie at its floor
    rises at once. `decomposition`: components that share no section are solved one by one. `dynamic`: it branches where there are fewest
    cases, otherwise at the lowest floor. `symmetry`: of buffers that are alike the first lies lowest. `memory`: what failed once is not
    tried again. `restarts`: it starts anew with other orders of trying, each time for longer.
    """

    max_nodes: int = 2_000_000
    max_seconds: float = math.inf
    max_looks: int = 20_000_000_000
    max_cells: int = 5_000_000
    canonical: bool = True
    inference: bool = True
    lifting: bool = True
    decomposition: bool = True
    dynamic: bool = True
    symmetry: bool = True
    memory: bool = True
    restarts: bool = True

    def place(self, problem: PlaceProblem, capacity_bytes: int | None = None) -> Placement:
        """The smallest arena that was found with the highest bound that was proven, or the first placement within the capacity.

        `stats` count the nodes, and the questions "does it fit" that were asked.
        """
        *_, last = self.answers(problem, capacity_bytes)
        return last

    def answers(self, problem: PlaceProblem, capacity_bytes: int | None = None) -> Iterator[Placement]:
        began = time.monotonic()
        first = _FIRST.place_by(began + self.max_seconds, problem, capacity_bytes)
        best = placed(
            problem, first.offsets, self, capacity_bytes=capacity_bytes, bound_bytes=first.lower_bound_bytes,
            stats={"nodes": 0, "questions": 0},
        )  # fmt: skip
        yield best
        size = max(cells(problem), 1)
        if _is_open(best, capacity_bytes) and max(size, pairs(problem)) <= self.max_cells:
            hunt = _CapacityHunt(problem, self, best, capacity_bytes)
            max_nodes = min(self.max_nodes, self.max_looks // size)
            while _is_open(hunt.best, capacity_bytes) and hunt.nodes < max_nodes and time.monotonic() - began < self.max_seconds:
                if hunt.go_on(min(max_nodes - hunt.nodes, max(1, _CHUNK_LOOKS // size))):
                    yield hunt.best
            yield replace(hunt.best, stats=hunt.stats)


def _is_open(best: Placement, capacity_bytes: int | None) -> bool:
    """Whether there is something left to find out."""
    return best.status is (Status.FEASIBLE if capacity_bytes is None else Status.UNKNOWN)


class _CapacityHunt:
    """Which capacity to ask about next, and what is known so far.

    With a capacity there is one question. Without, the first is whether the lower bound can be met, and others lie in the middle between
    bound and arena. One that is not answered within the present quota of nodes is put aside, and others beside it are asked; when all
    are hard, the quota grows, and the lowest is taken up again.
    """

    def __init__(self, problem: PlaceProblem, solver: Exact, best: Placement, capacity_bytes: int | None) -> None:
        self.problem, self.solver, self.best, self.capacity_bytes = problem, solver, best, capacity_bytes
        self.cut = cut(problem)
        self.switches = Switches(**{each.name: getattr(solver, each.name) for each in fields(Switches)})
        self.question: CapacityQuestion | None = None
        self.quota = _QUOTA
        self.hard: dict[int, CapacityQuestion] = {}  # by capacity
        self.nodes = self.questions = 0
        if self.cut.idle_bytes > best.lower_bound_bytes:
            self._learn(best.offsets, self.cut.idle_bytes)

    @property
    def stats(self) -> dict[str, int]:
        return {"nodes": self.nodes, "questions": self.questions}

    def go_on(self, nodes: int) -> bool:
        """At most this many nodes more; whether there is a better placement or bound."""
        question = self.question = self.question or self._next()
        before = question.nodes
        answer = question.go_on(nodes)
        self.nodes += question.nodes - before
        if answer in (YES, NO):
            self.question = None
            self._note(question, answer == YES)
            return True
        if question.nodes >= self.quota and self.capacity_bytes is None:
            self.hard[question.capacity] = question
            self.question = None
        return False

    def _note(self, question: CapacityQuestion, fits: bool) -> None:
        if fits:
            self._learn(self.cut.offsets(self.problem, question.floor), self.best.lower_bound_bytes)
        else:
            self._learn(self.best.offsets, (question.capacity + 1) * self.cut.unit_bytes)

    def _learn(self, offsets: ArrayLike, bound_bytes: int) -> None:
        self.best = placed(
            self.problem, offsets, self.solver, capacity_bytes=self.capacity_bytes, bound_bytes=bound_bytes, stats=self.stats
        )  # fmt: skip

    def _next(self) -> CapacityQuestion:
        unit = self.cut.unit_bytes
        if self.capacity_bytes is not None:
            return self._new(self.capacity_bytes // unit)
        low, high = -(-self.best.lower_bound_bytes // unit), (self.best.arena_bytes - 1) // unit
        if not self.questions:
            return self._new(low)
        self.hard = {capacity: self.hard[capacity] for capacity in sorted(self.hard) if low <= capacity <= high}
        if not self.hard:
            return self._new((low + high) // 2)
        least, most = min(self.hard), max(self.hard)
        if max(least - low, high - most) <= (high - low) // 64:
            self.quota *= 4
            return self.hard.pop(least)
        return self._new(most + (high - most + 1) // 2 if high - most >= least - low else low + (least - low) // 2)

    def _new(self, capacity: int) -> CapacityQuestion:
        self.questions += 1
        return CapacityQuestion(self.cut, self.switches, capacity)
