"""Neighbours of a schedule: what the search changes of a recipe, where that can matter.

A schedule follows from its recipe, so that a neighbour is a changed recipe: some of what is repeated left out, another rule, or exceptions
from the rule. An exception for a tensor that eviction never weighed changes nothing, nor does one that keeps what was kept: none of those
is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from lowtide.remat.archive import Point, Recipe
from lowtide.remat.eviction import Bias, ScoreWeights
from lowtide.remat.problem import RematProblem
from lowtide.remat.pruning import repeats
from lowtide.remat.state import BYSTANDER, CHOSEN, WEIGHED

RULES = tuple(ScoreWeights(a, b, c) for a, b, c in product((0.5, 1.0, 1.6), (0.5, 1.0, 1.4), (0.0, 0.4, 1.0)))
_STORES = ((0.0, 1e9), (0.05, 0.05), (0.05, 0.2), (0.1, 0.1), (0.14, 0.3), (0.3, 0.3), (0.3, 1e9))  # store_above, store_cap
_LOADS = ((0.02, 1.2), (0.02, 2.0), (0.1, 1.2), (0.1, 2.0), (0.2, 4.0))  # load_weight, lead; each with loads that push and without
_FEWER, _ONWARD, _RULE, _EXCEPT, _STORE = range(5)  # repeat less; go on from the runs, another rule; another rule; exceptions; for stores
_PLAIN = (0.3, 0.1, 0.15, 0.45, 0.0)  # how often each is drawn
_SWAPPING = (0.4, 0.1, 0.1, 0.1, 0.3)  # the same where tensors may be swapped
_FACTORS = (3.0, 20.0, 100.0)  # of a tensor's score, or one over that
_MOST = 1e6  # that factors come to
_STORE_FACTORS = (0.0, 0.3, 3.0, 100.0)  # of its worth where something to store is chosen


@dataclass(frozen=True)
class Neighbours:
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def rules(self, problem: RematProblem, count: int) -> list[ScoreWeights]:
        """Some rules, all different: with swapping where there are links."""
        positions = self.random.choice(len(RULES), count, replace=False)
        return [RULES[position] if problem.links is None else self._with_swaps(RULES[position]) for position in positions]

    def rule(self, problem: RematProblem) -> ScoreWeights:
        return self.rules(problem, 1)[0]

    def _with_swaps(self, rule: ScoreWeights) -> ScoreWeights:
        above, cap = _STORES[self.random.integers(len(_STORES))]
        weight, lead = _LOADS[self.random.integers(len(_LOADS))]
        pushes = bool(self.random.integers(2))
        return replace(rule, store_above=above, store_cap=cap, load_weight=weight, lead=lead, pushes=pushes)

    def neighbour(self, problem: RematProblem, point: Point) -> Recipe:
        plain = problem.codes.runs_in(point.sequence)
        recipe = point.recipe or Recipe(plain, RULES[0])
        again = repeats(plain, problem.problem.node_count)
        change = int(self.random.choice(5, p=_PLAIN if problem.links is None else _SWAPPING))
        if change == _FEWER and len(again):
            return replace(recipe, base=np.delete(plain, self._some(again)))
        if change == _EXCEPT and point.roles is not None:
            return replace(recipe, bias=self._exceptions(_bias(problem, recipe), point.roles))
        if change == _STORE and point.roles is not None:
            return replace(recipe, bias=self._stores(problem, _bias(problem, recipe), point.roles))
        return replace(recipe, base=plain if change == _ONWARD else recipe.base, weights=self.rule(problem))

    def _some(self, again: NDArray[np.intp]) -> NDArray[np.intp]:
        """Some of the repeated runs: scattered, or a stretch of them."""
        count = int(self.random.integers(1, 9))
        if self.random.integers(2):
            return self.random.choice(again, min(count, len(again)), replace=False)
        start = int(self.random.integers(len(again)))
        return again[start : start + 2 * count]

    def _exceptions(self, bias: Bias, roles: NDArray[np.int8]) -> Bias:
        """Keep some of what was evicted, or evict some of what could have been, or both."""
        keep, which = bias.keep.copy(), int(self.random.integers(3))
        if which != 0:
            keep[self._few(np.flatnonzero(roles == CHOSEN))] *= self.random.choice(_FACTORS)
        if which != 1:
            keep[self._few(np.flatnonzero(roles == WEIGHED))] /= self.random.choice(_FACTORS)
        return Bias(np.clip(keep, 1 / _MOST, _MOST), bias.store)

    def _stores(self, problem: RematProblem, bias: Bias, roles: NDArray[np.int8]) -> Bias:
        """Other worths for some of what may be stored and was wanted away."""
        store = bias.store.copy()
        if problem.links is not None:
            store[self._few(np.flatnonzero(problem.links.storable & (roles != BYSTANDER)))] = self.random.choice(_STORE_FACTORS)
        return Bias(bias.keep, store)

    def _few(self, candidates: NDArray[np.intp]) -> NDArray[np.intp]:
        count = min(int(self.random.integers(1, 4)), len(candidates))
        return self.random.choice(candidates, count, replace=False) if count else candidates


def _bias(problem: RematProblem, recipe: Recipe) -> Bias:
    ones = np.ones(problem.problem.tensor_count)
    return recipe.bias or Bias(ones, ones)
