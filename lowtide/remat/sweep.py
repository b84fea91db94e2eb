"""Everything that was seen of memory against time: the search that fills the archive from which any limit is answered.

Each point is a whole schedule with recomputation and swapping. The sweep does not know the limit that will be asked for, so that two
limits are answered from the same points: less memory never gives a higher peak, more memory never a slower program.

The sweep goes down from the peak of the fastest order without recomputation, in wide steps and then at the levels between, until eviction
finds nothing any more. At each level it evicts under several rules, from every order given and from the best schedules seen so far. Then it
climbs at each level: another rule, some of what is repeated left out, exceptions from the rule for single tensors; eviction makes a whole
right schedule of whatever that is (large neighbourhood search), and what is no slower goes on. Effort is counted in states, schedules built
and costed, and in the runs that they hold, so that large graphs do not take longer.

All of this is done in rounds of growing effort, none of which depends on when the search is stopped: a search of more states does what one
of less does, and then more, so that it is never worse. Where something is swapped that holds of whole rounds, as one half of a round goes
on from what the other has found by then; behind each round limits of the host's memory are searched, too (`remat.host_levels`). A whole
round ends with local moves (`remat.refinement`), which go on where eviction finds nothing. They are no states.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count, islice, product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtide.base.process import Helper
from lowtide.problems.order import Ints
from lowtide.remat.archive import Archive, Point, Recipe
from lowtide.remat.eviction import EvictionAttempt, ScoreWeights, attempt
from lowtide.remat.guesses import Guesses
from lowtide.remat.host_levels import HostLevels
from lowtide.remat.neighbours import RULES, Neighbours
from lowtide.remat.problem import RematProblem
from lowtide.remat.refinement import Refinement
from lowtide.remat.seeds import Seeds

# States and runs of each; those that follow take twice as much each. Two of a size find more than one of both: they begin from nothing.
_ROUNDS = ((600, 6_000_000), (6000, 6_000_000), (9000, 9_000_000), (14_400, 25_000_000))
_STATES, _FEW = 100, 8  # a level wants so many states at least; and so many levels there are in any case
_PLANTED, _GUESSED = 6, 20  # a share of the runs goes to what is planned block by block, one of states and runs to first guesses
_RULES = 5  # that are tried at each level from each order
_FIRST, _SLOW = 3, 1.03  # rules that show whether a problem is worth the others: one that takes so many times longer is not
_REST = 3  # levels
_WITHIN_HOST = 4  # with swapping, a share of the states goes to limits of the host, beside all others
_COARSE = 4  # of so many levels one is tried first
_NEAR = 6  # points on either side of a limit whose recipes are tried there
_DEEPER, _FINE = 30, 4  # a share of the states goes on below the smallest limit that has an answer, in steps so much finer than a level
_AT_ONCE = 2  # neighbours are built side by side
_STALE = 50  # neighbours in a row that were all tried before: a level is done
_LARGE = 500  # nodes of a problem for which a second thread is worth waking
_HEARD_EVERY = 100  # states: whoever listens to a search hears of so many at once

# Called by either thread with the share of the effort that is done, and what was found.
SweepListener: TypeAlias = Callable[[float, Archive], None]


@dataclass(frozen=True)
class Sweep:
    """How far to look.

    levels: limits tried, from the peak without recomputation down to what is resident.
    max_states: schedules built. With swapping, as many again, and a quarter for limits of the host's memory.
    max_runs: the runs of nodes in all these schedules together, and what choosing victims takes beyond the usual, in as many runs. A round
        after the first is begun where what is left does for it, so that small problems have more rounds.
    max_seconds: only stops the search, and the answer says so.
    """

    levels: int = 96
    max_states: int = 30_000
    max_runs: int = 46_000_000
    max_seconds: float = math.inf

    def holds(self, other: Sweep) -> bool:
        """Whether all that another search finds that nothing stops is found by this one, too."""
        return self.levels == other.levels and self.max_states >= other.max_states and self.max_runs >= other.max_runs

    def explore(
        self,
        problems: Sequence[RematProblem],
        orders: Sequence[Sequence[Ints]],
        seeds: Seeds | None = None,
        listener: SweepListener | None = None,
    ) -> Archive:
        """The archive of these problems, each with some orders of its nodes as sequences; the same input always gives the same one.

        Interrupted from the keyboard, it holds what was found by then. `seeds` holds what other searches have planned by blocks. What the
        `listener` does changes nothing.
        """
        seeds, known, plain_known, done_states = seeds or Seeds(), Archive(), Archive(), 0
        deadline, swaps = time.monotonic() + self.max_seconds, any(problem.links is not None for problem in problems)
        states, runs = self.max_states, self.max_runs
        for most_states, most_runs in _rounds():
            if states <= 0 or runs < (most_runs if done_states else 1):
                break
            each = _Round(self.levels, most_states, most_runs, min(states, most_states), min(runs, most_runs))
            shares = done_states / self.max_states, each.end_states / self.max_states
            listening = None if listener is None else partial(as_part, listener, *shares)
            plain = _SweepSearch(each, [problem.without_links for problem in problems], orders, seeds, listening, deadline)
            plain.before = plain_known
            both = _SweepSearch(each, problems, orders, seeds, listening, deadline) if swaps else None
            known.merge(plain.done() if both is None else _both(plain, both))
            if known.interrupted or known.out_of_time:
                break
            if both is not None:
                share = (each.end_states // _WITHIN_HOST, each.end_runs // _WITHIN_HOST)
                known.merge(HostLevels(problems, orders, known, *share, deadline).explored(each.limits(known)))
                if known.interrupted or known.out_of_time:
                    break
            plain_known.merge(plain.archive)
            done_states += most_states
            states, runs = states - most_states, runs - min(most_runs, max(plain.runs, 0 if both is None else both.runs))
        return known


def _rounds() -> Iterator[tuple[int, int]]:
    yield from _ROUNDS
    for doubled in count(1):
        yield _ROUNDS[-1][0] << doubled, _ROUNDS[-1][1] << doubled


def as_part(listener: SweepListener, before: float, weight: float, share: float, archive: Archive) -> None:
    """Tell a listener of all what a part of it has done: so much was before, and so much of all is the part."""
    listener(before + weight * share, archive)


@dataclass(frozen=True)
class _Round:
    """A part of a search.

    levels, states, runs: how far it looks, on which its shares depend. end_states, end_runs: where it is stopped.
    """

    levels: int
    states: int
    runs: int
    end_states: int
    end_runs: int

    @property
    def is_whole(self) -> bool:
        return self.end_states == self.states and self.end_runs == self.runs

    def levels_between(self, top_bytes: int, floor_bytes: int) -> list[int]:
        count = min(self.levels, max(_FEW, self.states // _STATES))
        return [top_bytes - (top_bytes - floor_bytes) * step // count for step in range(1, count)]

    def limits(self, known: Archive) -> list[int]:
        """Levels between what the fastest schedule takes and the leanest, and that."""
        least_bytes = known.points[0].peak_bytes
        return [*self.levels_between(known.points[-1].peak_bytes, least_bytes), least_bytes]


def _both(plain: _SweepSearch, swapping: _SweepSearch) -> Archive:
    """Two searches side by side; the one with swapping climbs from what the other found, too, and so is never worse.

    Kernels run without Python's lock.
    """
    plain.beside, swapping.beside = swapping, plain
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(plain.done)
        merged = swapping.done(other)
        plain.stopped |= merged.interrupted
        try:
            merged.merge(other.result())
        except KeyboardInterrupt:
            plain.stopped = True
            merged.merge(other.result())
            merged.interrupted = True
    return merged


class _SweepSearch:
    beside: _SweepSearch | None = None  # that runs at the same time
    before = Archive()  # what rounds before have found

    def __init__(
        self,
        part: _Round,
        problems: Sequence[RematProblem],
        orders: Sequence[Sequence[Ints]],
        seeds: Seeds,
        listener: SweepListener | None,
        deadline: float,
    ) -> None:
        self.round, self.problems, self.orders, self.seeds, self.listener = part, problems, orders, seeds, listener
        self.stopped = False
        self.archive, self.runs = Archive(), 0
        self.neighbours, self.tried = Neighbours(), set[bytes]()
        self.resting: dict[int, int] = {}  # by problem, the levels at which its orders are left alone
        self.deadline = deadline
        self.helper = Helper(max(problem.problem.node_count for problem in problems) >= _LARGE)

    def done(self, other: Future[Archive] | None = None) -> Archive:
        """All of it; where there is another search, what that found is climbed from, too."""
        for which, orders in enumerate(self.orders):
            for order in orders:
                self.see(which, order)
        try:
            with self.helper:
                self.go(other)
        except KeyboardInterrupt:
            self.archive.interrupted = True
        return self.archive

    def go(self, other: Future[Archive] | None) -> None:
        """Down the levels, then over all that have an answer, from the top and back."""
        levels = self.levels()
        self.plant(levels)
        self.guess(levels)
        self.descend(levels)
        self.deepen(levels[0] - levels[1] if len(levels) > 1 else 1)
        for point in () if other is None else other.result().points:
            self.archive.add(point.padded(self.problems[point.problem].problem.tensor_count))
        reached = [limit for limit in levels if self.archive.within(limit) is not None]
        turns = [*reached, *reversed(reached)]
        for turn, limit in enumerate(turns):
            self.climb(limit, len(turns) - turn)
        if self.round.is_whole and self.problems[0].links is None:
            effort = self.round.states, self.round.runs
            Refinement(self.archive, self.before, self.problems, *effort, self.neighbours.random, self.halted).refine(levels)

    def plant(self, levels: Sequence[int]) -> None:
        """Schedules planned block by block, as far as a part of the effort goes. With links the other search has them.

        Of a graph whose orders those of another beat as they stand, none is planned.
        """
        until, worth = self.round.runs // _PLANTED, {point.problem for point in self.archive.points}
        for which, (problem, orders) in enumerate(zip(self.problems, self.orders, strict=True)):
            for order in orders if problem.links is None and which in worth else ():
                for sequence in islice(self.seeds.of(problem, order, levels), self.round.states // 20):
                    if self.over() or self.runs >= until:
                        return
                    self.count(len(sequence))
                    self.see(which, sequence, Recipe(sequence, RULES[0]))

    def guess(self, levels: Sequence[int]) -> None:
        """What the best choices at the peak of each order keep, at each level, as far as a part of the effort goes. Links have no guess."""
        until, until_runs = self.archive.states + self.round.states // _GUESSED, self.runs + self.round.runs // _GUESSED
        plain = [(which, problem) for which, problem in enumerate(self.problems) if problem.links is None]
        guesses = [(which, Guesses(problem, order)) for which, problem in plain for order in self.orders[which] if len(order)]
        for limit, (which, each) in product(levels, guesses):
            if self.archive.states >= until or self.runs >= until_runs:
                return
            self.attempts(limit, [(which, recipe) for recipe in each.within(limit)])

    def levels(self) -> list[int]:
        """Limits from just under the peak of the fastest order seen down to what is resident; the last ones halve what is left each time.

        Without these, what little effort finds would end at the last of a few even steps, far above what is resident.
        """
        top, floor = self.archive.points[-1].peak_bytes, min(problem.problem.resident_bytes for problem in self.problems)
        levels, gap = self.round.levels_between(top, floor), (top - floor) // self.round.levels
        while levels and levels[-1] - floor > 2 * gap > 0:
            levels.append((levels[-1] + floor) // 2)
        return levels

    def descend(self, levels: Sequence[int]) -> None:
        """Evict at each level until nothing is found; the smallest limit that has an answer is then found by halving.

        First at a few levels all the way down, so that little effort goes as far as much; then at those between.
        """
        coarse = levels[_COARSE - 1 :: _COARSE] if len(levels) > _COARSE * _FEW else levels
        for pace in (coarse, sorted(set(levels).difference(coarse), reverse=True)):
            self.go_down(pace)

    def go_down(self, levels: Sequence[int]) -> None:
        """Evict at each of these, until nothing is found below the leanest schedule; then halve what is between."""
        for limit in levels:
            least = self.archive.points[0].peak_bytes
            if not self.seed(limit) and limit < least:
                return self.halve(limit, least)
        return None

    def halve(self, low: int, high: int) -> None:
        """Between a limit that has no answer and one that has."""
        while high - low > max(1, high // 500) and not self.over():
            middle = (low + high) // 2
            if self.seed(middle):
                high = min(middle, self.archive.points[0].peak_bytes)
            else:
                low = middle

    def deepen(self, step: int) -> None:
        """Change the leanest schedule, again and again, for ones that are leaner: where rules end, exceptions may still lead on."""
        until, stale = self.archive.states + self.round.states // _DEEPER, 0
        while self.archive.states < until and stale < _STALE and not self.over():
            point = self.archive.points[0]
            limit = point.peak_bytes - max(1, step // _FINE)
            before = self.archive.states
            self.attempts(limit, self.around(point))
            stale = stale + _AT_ONCE if self.archive.states == before else 0

    def seed(self, limit: int) -> bool:
        """Evict from every order, and from the leanest schedule seen, under many rules; under few where others are much faster.

        A problem that was much slower than others rests for some levels, as long as those find something.
        """
        near = self.archive.points[0]
        leanest = near.problem, self.problems[near.problem].codes.runs_in(near.sequence)
        resting = {which for which, left in self.resting.items() if left > 0}
        seeded = self.seed_from(limit, [*self.bases(lambda which: which not in resting), leanest])
        if not seeded and resting:
            seeded = self.seed_from(limit, self.bases(lambda which: which in resting))
        return seeded | self.repeat_near(limit)

    def bases(self, wanted: Callable[[int], bool]) -> list[tuple[int, Ints]]:
        return [(which, order) for which, orders in enumerate(self.orders) if wanted(which) for order in orders]

    def seed_from(self, limit: int, bases: Sequence[tuple[int, Ints]]) -> bool:
        """Evict from these; whether anything was found."""
        drawn = [(which, base, self.neighbours.rules(self.problems[which], _RULES)) for which, base in bases]
        least = self.seeded(limit, ((which, base, rules[:_FIRST]) for which, base, rules in drawn))
        slow_us = min(least.values(), default=math.inf) * _SLOW
        more = self.seeded(limit, ((which, base, rules[_FIRST:]) for which, base, rules in drawn if least.get(which, math.inf) <= slow_us))
        self.resting = {which: left - 1 for which, left in self.resting.items()}
        self.resting |= {which: _REST for which, _ in bases if least and least.get(which, math.inf) > slow_us}
        return bool(least or more)

    def seeded(self, limit: int, drawn: Iterable[tuple[int, Ints, Sequence[ScoreWeights]]]) -> dict[int, float]:
        """Evict from orders under rules: by problem the least time that was found."""
        least: dict[int, float] = {}
        for point in self.attempts(limit, [(which, Recipe(base, weights)) for which, base, rules in drawn for weights in rules]):
            least[point.problem] = min(least.get(point.problem, math.inf), point.time_us)
        return least

    def repeat_near(self, limit: int) -> bool:
        """What made the best schedules of limits nearby, done at this one."""
        near = [(point.problem, point.recipe) for point in self.archive.near(limit, _NEAR) if point.recipe is not None]
        return bool(self.attempts(limit, near))

    def climb(self, limit: int, turns: int) -> None:
        """Change the fastest schedule within the limit, again and again; this turn's share of what effort is left."""
        self.repeat_near(limit)
        point, stale = self.archive.within(limit), 0
        states = self.archive.states + (self.round.states - self.archive.states) // turns
        runs = self.runs + (self.round.runs - self.runs) // turns
        while point and self.archive.states < states and self.runs <= runs and stale < _STALE and not self.over():
            before = self.archive.states
            best = min(self.attempts(limit, self.around(point)), key=lambda each: each.time_us, default=point)
            stale = stale + _AT_ONCE if self.archive.states == before else 0
            if best.time_us <= point.time_us:
                point = best

    def around(self, point: Point) -> list[tuple[int, Recipe]]:
        return [(point.problem, self.neighbours.neighbour(self.problems[point.problem], point)) for _ in range(_AT_ONCE)]

    def attempts(self, limit: int, recipes: Sequence[tuple[int, Recipe]]) -> list[Point]:
        """A state of each recipe for a problem, as far as there is one that was not built before, and effort for it."""
        fresh: list[tuple[int, Recipe]] = []
        for which, recipe in recipes:
            digest = recipe.digest(which, limit)
            if digest not in self.tried and not self.over() and self.archive.states + len(fresh) < self.round.end_states:
                self.tried.add(digest)
                fresh.append((which, recipe))

        def evicted(each: tuple[int, Recipe]) -> EvictionAttempt:
            which, recipe = each
            return attempt(self.problems[which], recipe.base, limit, recipe.weights, recipe.bias)

        points: list[Point] = []
        for (which, recipe), tried in zip(fresh, self.helper.made_of(fresh, evicted), strict=True):
            if self.over():
                break
            self.count(tried.runs)
            if tried.result is not None:
                points.append(self.see(which, tried.result.sequence, recipe, tried.result.roles))
        return points

    def count(self, runs: int) -> None:
        self.archive.states += 1
        self.runs += runs
        if self.listener is not None and self.archive.states % _HEARD_EVERY == 0:
            self.listener(self.share if self.beside is None else (self.share + self.beside.share) / 2, self.archive)

    @property
    def share(self) -> float:
        return min(1.0, max(self.archive.states / self.round.end_states, self.runs / self.round.end_runs))

    def see(self, which: int, sequence: Ints, recipe: Recipe | None = None, roles: NDArray[np.int8] | None = None) -> Point:
        point = Point.of(self.problems[which], which, sequence, recipe, roles)
        self.archive.add(point)
        return point

    def over(self) -> bool:
        return self.archive.states >= self.round.end_states or self.runs >= self.round.end_runs or self.halted()

    def halted(self) -> bool:
        """Whether somebody stopped it, or its time is up."""
        self.archive.out_of_time |= time.monotonic() > self.deadline
        return self.stopped or self.archive.out_of_time
