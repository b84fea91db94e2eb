"""The exact placer: placements proven to need the smallest arena, or a gap that is proven.

It asks one question again and again, "does it fit within this capacity", each in many ways until one of them answers.

How long a search takes has a heavy tail: an order of trying that is lucky needs as many nodes as there are buffers, another one
millions. So it starts anew again and again, in several ways, mostly for short runs and sometimes for long ones. What failed is
remembered all along; and each way remembers how often each section failed, and branches there the earlier.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowtide.placement.base import Anytime, Placement, placed
from lowtide.placement.bounds import Rules
from lowtide.placement.floors import FloorWalk, SeenStates, enlarge, new_seen, walk_of
from lowtide.placement.greedy import Greedy
from lowtide.placement.search import FULL, NO, NODES, YES, PlaceStack, grown, new_stack, search
from lowtide.placement.sections import SectionNet, Sections, cells, cut, pairs
from lowtide.problems import Status
from lowtide.problems.placement import Ints, PlaceProblem

_FIRST_NODES = 500  # of the shortest runs
_FORGET = 0.9  # of a section's weight, kept from one run to the next
_SLOTS, _MOST_SLOTS = 1 << 12, 1 << 20  # of the table of what failed


class TryOrder(NamedTuple):
    rank: str  # what comes first: the buffer's most Total bytes of a section, its Width in sections, its Area
    filling: int  # as in Rules
    weighted: int


WAYS = (TryOrder("TAW", 2, 1), TryOrder("TWA", 1, 1), TryOrder("TAW", 0, 0))


@dataclass(frozen=True)
class Switches:
    canonical: bool
    inference: bool
    lifting: bool
    decomposition: bool
    dynamic: bool
    symmetry: bool
    memory: bool
    restarts: bool


class CapacityQuestion:
    """Whether a problem fits within `capacity` units."""

    def __init__(self, cut: Sections, switches: Switches, capacity: int) -> None:
        self.net, self.switches, self.capacity = cut.net, switches, capacity
        self.seen: SeenStates = new_seen(_SLOTS)
        self.ranks = {strategy: _rank(cut.net, strategy.rank) for strategy in WAYS}
        self.fresh = walk_of(cut.net)
        self.weight: dict[TryOrder, NDArray[np.float64]] = {}  # of sections, as each way has learned it
        self.strategy = WAYS[0]
        self.runs = self.done_nodes = 0
        self._start_anew()

    @property
    def nodes(self) -> int:
        return self.done_nodes + int(self.stack.registers[NODES])

    @property
    def floor(self) -> Ints:
        """After YES: offsets in units."""
        floor: Ints = self.walk.floor
        return floor

    def go_on(self, nodes: int) -> int:
        """YES, NO, or PAUSED after at most this many nodes more."""
        spent = int(self.stack.registers[NODES])
        if spent >= self.quota and self.switches.restarts:
            self._start_anew()
            spent = 0
        until = spent + nodes
        if self.switches.restarts:
            until = min(until, self.quota)
        while True:
            may_grow = len(self.seen.words) < _MOST_SLOTS
            answer = int(search(self.net, self.walk, self.stack, self.seen, self.rules, self.capacity, until, may_grow))
            if answer != FULL:
                return answer
            self._grow()

    def _start_anew(self) -> None:
        if self.runs:
            self.done_nodes += int(self.stack.registers[NODES])
            self.weight[self.strategy] = _FORGET * self.walk.weight + (1 - _FORGET)
        strategy = self.strategy = WAYS[self.runs % len(WAYS)]
        self.runs += 1
        self.quota = _FIRST_NODES * luby(self.runs)
        self.walk: FloorWalk = FloorWalk(
            *(each.copy() for each in self.fresh._replace(weight=self.weight.get(strategy, self.fresh.weight)))
        )
        self.stack: PlaceStack = new_stack(self.net)
        on = self.switches
        self.rules = Rules(
            int(on.canonical), int(on.inference), int(on.lifting), int(on.decomposition), int(on.dynamic), int(on.symmetry),
            int(on.memory), strategy.weighted, strategy.filling, self.ranks[strategy],
        )  # fmt: skip

    def _grow(self) -> None:
        if 2 * int(self.seen.count[0]) > len(self.seen.words) and len(self.seen.words) < _MOST_SLOTS:
            larger = new_seen(2 * len(self.seen.words))
            enlarge(self.seen, larger)
            self.seen = larger
        else:
            self.walk, self.stack = grown(self.walk, self.stack)


def luby(run: int) -> int:
    """How long the run with this number, from 1 on, is: 1, 1, 2, 1, 1, 2, 4, 1, ...: of each length as many times in all as of any other.

    No fixed sequence of restarts is better by more than a logarithm, whatever the distribution (Luby, Sinclair and Zuckerman, 1993).
    """
    while run & (run + 1):
        run -= (1 << (run.bit_length() - 1)) - 1
    return (run + 1) // 2


def _rank(net: SectionNet, letters: str) -> NDArray[np.int64]:
    """Each buffer's place in the order that `letters` describe, the largest first."""
    width = net.high - net.low
    member = np.repeat(np.arange(len(net.member_ptr) - 1), np.diff(net.member_ptr))
    total = np.bincount(member, net.size[net.member_ids], len(net.member_ptr) - 1)
    most = np.zeros(len(net.size))
    np.maximum.at(most, net.member_ids, total[member])
    features = {"T": most, "W": width, "A": net.size * width}
    order = np.lexsort([features[letter] for letter in reversed(letters)])[::-1]
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank


_FIRST = Greedy("pressure")
_QUOTA = 16_000  # nodes that a question gets before it is put aside, at first
_CHUNK_LOOKS = 10_000_000  # between two looks at the clock


@dataclass(frozen=True)
class Exact(Anytime):
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

    def answers(self, problem: PlaceProblem, capacity_bytes: int | None = None) -> Iterator[Placement]:
        """Smaller and smaller arenas, and higher and higher bounds; `stats` count nodes, and the questions "does it fit"."""
        began = time.monotonic()
        first = _FIRST.place_by(began + self.max_seconds, problem, capacity_bytes)
        best = placed(
            problem,
            first.offsets,
            self,
            capacity_bytes=capacity_bytes,
            bound_bytes=first.lower_bound_bytes,
            stats={"nodes": 0, "questions": 0},
        )
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
        )

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
