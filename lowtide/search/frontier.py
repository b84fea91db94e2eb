"""Everything that was seen of memory against time: the search that fills the archive from which any limit is answered.

Each point is a whole schedule with recomputation and swapping. The sweep does not know the limit that will be asked for, so that two
limits are answered from the same points: less memory never gives a higher peak, more memory never a slower program.

The sweep goes down from the peak of the best order without recomputation, in even steps, until eviction finds nothing any more. At each
level it evicts under several rules, from every order given and from the best schedules seen so far. Then it climbs at each level: another
rule, some of what is repeated let go, exceptions from the rule for single tensors; eviction makes a whole right schedule of whatever that
is (large neighbourhood search), and what is no slower goes on. Effort is counted in states, schedules built and costed, and in the runs
that they hold, so that large graphs do not take longer.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, product

import numpy as np
from numpy.typing import NDArray

from lowtide.ir.problem import Ints
from lowtide.search.archive import Archive, Point, Recipe
from lowtide.search.evict import Bias, Weights, evict
from lowtide.search.runs import RunProblem, cost_of
from lowtide.search.seeds import seeds

_WEIGHTS = tuple(Weights(a, b, c) for a, b, c in product((0.5, 1.0, 1.6), (0.5, 1.0, 1.4), (0.0, 0.4, 1.0)))
_STORES = ((0.0, 1e9), (0.05, 0.05), (0.05, 0.2), (0.1, 0.1), (0.14, 0.3), (0.3, 0.3), (0.3, 1e9))  # store_above, store_cap
_LOADS = ((0.02, 2.0), (0.1, 2.0), (0.1, 4.0), (0.2, 4.0))  # load_weight, lead
_RULES = 9  # that are tried at each level from each order
_STATES, _FEW = 200, 8  # a level wants so many states at least; and so many levels there are in any case
_NEAR = 6  # points on either side of a limit whose recipes are tried there
_MOVES = (0.4, 0.15, 0.25, 0.2, 0.0)  # how often to repeat less, go on from the runs by another rule, take another rule, make exceptions
_SWAP_MOVES = (0.4, 0.1, 0.1, 0.1, 0.3)  # the same where tensors may be swapped, and exceptions for what is stored
_FACTORS = np.array([0.02, 0.2, 5.0, 50.0])  # of a tensor's score
_STORE_FACTORS = np.array([0.0, 0.3, 3.0, 100.0])  # of its worth


@dataclass(frozen=True)
class Sweep:
    """How far to look.

    levels: steps from the peak without recomputation to what is resident. max_states: schedules built. max_runs: what these hold together.
    Where tensors may be swapped, as much again is done with that. max_seconds: only a cap.
    """

    levels: int = 96
    max_states: int = 30_000
    max_runs: int = 30_000_000
    max_seconds: float = 60.0

    def explore(self, problems: Sequence[RunProblem], orders: Sequence[Sequence[Ints]]) -> Archive:
        """The archive of these problems, each with some orders of its nodes as sequences; the same input always gives the same one.

        Interrupted from the keyboard, it holds what was found by then.
        """
        plain = _Search(self, [dataclasses.replace(problem, links=None) for problem in problems], orders)
        if all(problem.links is None for problem in problems):
            return plain.done()
        return _both(plain, _Search(self, problems, orders))


def _both(plain: _Search, swapping: _Search) -> Archive:
    """What two searches find side by side: with swapping is then never worse than without. Kernels run without Python's lock."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(plain.done)
        found = swapping.done()
        plain.stopped |= found.interrupted
        try:
            found.merge(other.result())
        except KeyboardInterrupt:
            plain.stopped = True
            found.merge(other.result())
            found.interrupted = True
    return found


class _Search:
    def __init__(self, sweep: Sweep, problems: Sequence[RunProblem], orders: Sequence[Sequence[Ints]]) -> None:
        self.sweep, self.problems, self.orders = sweep, problems, orders
        self.stopped = False
        self.archive, self.runs = Archive(), 0
        self.random = np.random.default_rng(0)
        self.deadline = time.monotonic() + sweep.max_seconds

    def done(self) -> Archive:
        for which, orders in enumerate(self.orders):
            for order in orders:
                self.see(which, order)
        try:
            self.go()
        except KeyboardInterrupt:
            self.archive.interrupted = True
        return self.archive

    def go(self) -> None:
        """Down the levels, then over all that have an answer, from the top and back."""
        levels = self.levels()
        self.plant(levels)
        lowest = self.descend(levels)
        turns = [*levels[:lowest], *reversed(levels[:lowest])]
        for turn, limit in enumerate(turns):
            self.climb(limit, len(turns) - turn)

    def plant(self, levels: Sequence[int]) -> None:
        """Schedules planned block by block, as far as a part of the effort goes, and what eviction makes of them at the levels."""
        for which, (problem, orders) in enumerate(zip(self.problems, self.orders, strict=True)):
            for order in orders:
                for runs in islice(seeds(problem, order, levels), self.sweep.max_states // 20):
                    if self.over():
                        return
                    self.archive.states += 1
                    self.runs += len(runs)
                    self.see(which, runs, Recipe(runs, _WEIGHTS[0]))

    def levels(self) -> list[int]:
        """Limits from just under the least peak seen down to what is resident."""
        top, floor = self.archive.points[0].peak_bytes, min(problem.problem.resident_bytes for problem in self.problems)
        count = min(self.sweep.levels, max(_FEW, self.sweep.max_states // _STATES))
        return [top - (top - floor) * step // count for step in range(1, count)]

    def descend(self, levels: Sequence[int]) -> int:
        """Evict at each level until nothing is found; how many levels have an answer. The smallest limit is then found by halving."""
        for place, limit in enumerate(levels):
            if not self.seed(limit):
                self.halve(limit, levels[place - 1] if place else self.archive.points[0].peak_bytes)
                return place
        return len(levels)

    def halve(self, low: int, high: int) -> None:
        """Between a limit that has no answer and one that has."""
        while high - low > max(1, high // 500) and not self.over():
            middle = (low + high) // 2
            if self.seed(middle):
                high = min(middle, self.archive.points[0].peak_bytes)
            else:
                low = middle

    def seed(self, limit: int) -> bool:
        """Evict from every order, and from the leanest schedule seen, under many rules."""
        near = self.archive.points[0]
        bases = [(which, order) for which, orders in enumerate(self.orders) for order in orders]
        bases.append((near.problem, _without_swaps(near.runs, self.problems[near.problem])))
        found = False
        for which, base in bases:
            for weights in self.rules(which):
                found |= self.attempt(which, Recipe(base, weights), limit) is not None
        return found | self.repeat_near(limit)

    def rules(self, which: int) -> Iterator[Weights]:
        """Some rules: with swapping where there are links."""
        for place in self.random.choice(len(_WEIGHTS), _RULES, replace=False):
            yield _WEIGHTS[place] if self.problems[which].links is None else self.swapping()

    def repeat_near(self, limit: int) -> bool:
        """What made the best schedules of limits nearby, done at this one."""
        found = False
        for point in self.archive.near(limit, _NEAR):
            if point.recipe is not None:
                found |= self.attempt(point.problem, point.recipe, limit) is not None
        return found

    def swapping(self) -> Weights:
        """Some rule with swapping."""
        rule = _WEIGHTS[self.random.integers(len(_WEIGHTS))]
        above, cap = _STORES[self.random.integers(len(_STORES))]
        weight, lead = _LOADS[self.random.integers(len(_LOADS))]
        return dataclasses.replace(rule, store_above=above, store_cap=cap, load_weight=weight, lead=lead)

    def climb(self, limit: int, turns: int) -> None:
        """Change the fastest schedule within the limit, again and again; this turn's share of what effort is left."""
        self.repeat_near(limit)
        point = self.archive.within(limit)
        if point is None:
            return
        states = (self.sweep.max_states - self.archive.states) // turns
        runs = self.runs + (self.sweep.max_runs - self.runs) // turns
        for _ in range(states):
            if self.over() or self.runs > runs:
                return
            found = self.attempt(point.problem, self.changed(point), limit)
            if found is not None and found.time_us <= point.time_us:
                point = found

    def changed(self, point: Point) -> Recipe:
        """A neighbour of a schedule, as a recipe."""
        problem = self.problems[point.problem]
        plain = _without_swaps(point.runs, problem)
        recipe = point.recipe or Recipe(plain, _WEIGHTS[0])
        again = _repeats(plain, problem.problem.node_count)
        move = int(self.random.choice(5, p=_MOVES if problem.links is None else _SWAP_MOVES))
        if move == 0 and len(again):
            return dataclasses.replace(recipe, base=np.delete(plain, self.some(again)))
        if move == 1:
            return dataclasses.replace(recipe, base=plain, weights=self.any_rule(problem))
        if move == 2:
            return dataclasses.replace(recipe, weights=self.any_rule(problem))
        return dataclasses.replace(recipe, bias=self.biased(problem, recipe.bias, plain[again], stores=move == 4))

    def any_rule(self, problem: RunProblem) -> Weights:
        return _WEIGHTS[self.random.integers(len(_WEIGHTS))] if problem.links is None else self.swapping()

    def some(self, again: NDArray[np.intp]) -> NDArray[np.intp]:
        """Some of the repeated runs: scattered, or a stretch of them."""
        count = int(self.random.integers(1, 9))
        if self.random.integers(2):
            return self.random.choice(again, min(count, len(again)), replace=False)
        start = int(self.random.integers(len(again)))
        return again[start : start + 2 * count]

    def biased(self, problem: RunProblem, bias: Bias | None, repeated: Ints, stores: bool) -> Bias:
        """Further exceptions from the rule: for what is repeated now, for any tensors, or for what is stored."""
        ones = np.ones(problem.problem.tensor_count)
        keep, store = (ones, ones) if bias is None else (bias.keep, bias.store)
        count = int(self.random.integers(1, 4))
        if stores and problem.links is not None:
            among, factors, changed = np.flatnonzero(problem.links.storable), _STORE_FACTORS, store.copy()
        else:
            among, factors, changed = self.touched(problem, repeated), _FACTORS, keep.copy()
        if len(among):
            changed[self.random.choice(among, min(count, len(among)), replace=False)] = self.random.choice(factors)
        return Bias(keep, changed) if stores else Bias(changed, store)

    def touched(self, problem: RunProblem, repeated: Ints) -> NDArray[np.intp]:
        """Tensors whose exception may matter: half of the time what is made more than once, else any."""
        if len(repeated) and self.random.integers(2):
            return np.flatnonzero(np.isin(problem.problem.producer, repeated))
        return np.arange(problem.problem.tensor_count)

    def attempt(self, which: int, recipe: Recipe, limit: int) -> Point | None:
        """One state."""
        if self.over():
            return None
        found = evict(self.problems[which], recipe.base, limit, recipe.weights, recipe.bias)
        self.archive.states += 1
        self.runs += len(recipe.base if found is None else found)
        return None if found is None else self.see(which, found, recipe)

    def see(self, which: int, runs: Ints, recipe: Recipe | None = None) -> Point:
        cost = cost_of(self.problems[which], runs)
        point = Point(cost.peak_bytes, cost.time_us, which, runs, recipe)
        self.archive.add(point)
        return point

    def over(self) -> bool:
        effort = self.archive.states >= self.sweep.max_states or self.runs >= self.sweep.max_runs
        return effort or self.stopped or time.monotonic() > self.deadline


def _without_swaps(runs: Ints, problem: RunProblem) -> Ints:
    """The runs of a sequence alone."""
    return runs[runs < problem.problem.node_count]


def _repeats(runs: Ints, node_count: int) -> NDArray[np.intp]:
    """The places of runs that are not their node's first."""
    first = np.full(node_count, len(runs), np.int64)
    np.minimum.at(first, runs, np.arange(len(runs)))
    return np.flatnonzero(first[runs] < np.arange(len(runs)))
