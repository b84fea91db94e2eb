"""The programs in CP-SAT against all sequences of tiny graphs, and of buffers all choices."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from tests.yardstick.answers import Graph, answer_of, is_valid, least_by_state, peak_of
from yardstick.check import value_of

pytest.importorskip("ortools")

from yardstick.cp_sat import Solver, Twice, intervals, judged, moments
from yardstick.cp_spaces import most_benefit

SOLVER = Solver(seconds=20, workers=1)


def simple_graph(seed: int, count: int) -> Graph:
    """A graph whose node i makes tensor i, as MOCCASIN's are."""
    rng = random.Random(seed)
    reads = [sorted(rng.sample(range(node), min(node, rng.randint(1, 2)))) for node in range(count)]
    return {
        "format": "yardstick.graph", "name": "simple", "bytes": [rng.randint(1, 9) for _ in range(count)],
        "makes": [[node] for node in range(count)], "reads": reads, "cost": [rng.randint(1, 9) for _ in range(count)],
        "workspace_bytes": [0] * count, "after": [[]] * count, "takes": [[]] * count, "until": [[]] * count, "once": [],
        "kept": [], "resident_bytes": 0,
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_bounds_and_answers_lie_around_the_optimum(seed: int):
    graph = simple_graph(seed, 7)
    peak = peak_of(graph, list(range(7)))
    exact = 0
    for limit in range(peak, 0, -1):
        least = least_by_state(graph, limit, 2)
        twice = Twice(graph, limit)
        bound, answer = judged(twice, moments(twice, SOLVER)), intervals(twice, SOLVER)
        if not bound.possible:
            assert least == float("inf")
            break
        assert bound.bound is not None
        assert bound.bound <= least
        for each in (bound, answer):
            if each.answer is not None:
                value = value_of(graph, answer_of(graph, "remat-twice", each.answer["sequence"], limit))
                assert value >= least
                exact += value == least
    assert exact


def test_an_answer_of_moments_that_needs_more_is_left_out():
    graph = simple_graph(0, 5)
    twice = Twice(graph, 1)
    assert not is_valid(graph, answer_of(graph, "remat-twice", [0, 1, 2, 3, 4], 1))
    assert judged(twice, twice.finding([0, 1, 2, 3, 4], 3, "by hand", 0.0)).answer is None


@pytest.mark.parametrize("seed", range(10))
def test_no_choice_has_more_benefit_than_the_bound(seed: int):
    rng = random.Random(seed)
    count = 7
    start = [rng.randint(0, 5) for _ in range(count)]
    buffers = {
        "name": "random", "size": [rng.randint(0, 6) for _ in range(count)], "start": start,
        "end": [each + rng.randint(0, 4) for each in start], "spaces": [8, None], "benefit": [rng.randint(0, 9) for _ in range(count)],
        "allowed": [rng.choice(([0, 1], [0, 1], [0], [1])) for _ in range(count)],
    }  # fmt: skip
    best = -1
    for space in product((0, 1), repeat=count):
        rows = list(zip(space, buffers["allowed"], buffers["benefit"], strict=True))
        if all(where in allowed for where, allowed, _ in rows) and most_alive(buffers, space) <= buffers["spaces"][0]:
            best = max(best, sum(benefit for where, allowed, benefit in rows if where != allowed[-1]))
    if best >= 0:
        assert most_benefit(buffers, SOLVER).bound == best


def most_alive(buffers: dict[str, Any], space: Sequence[int]) -> int:
    """The most bytes alive in the fast space."""
    lives = list(zip(buffers["size"], buffers["start"], buffers["end"], space, strict=True))
    return max(sum(size for size, start, end, where in lives if where == 0 and start <= step < end) for step in range(10))


def test_other_spaces_are_refused():
    buffers = {"name": "three", "size": [], "start": [], "end": [], "spaces": [1, 2, None], "allowed": [], "benefit": []}
    with pytest.raises(ValueError, match="three: expected two spaces"):
        most_benefit(buffers, SOLVER)
