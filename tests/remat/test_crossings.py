"""The best choices at a moment against all choices of small problems; the bound that they prove against sequences that swap."""

from __future__ import annotations

import dataclasses
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.remat.bound import Crossing, TimeBound
from lowtide.remat.cost import cost_of
from lowtide.remat.eviction import ScoreWeights
from lowtide.remat.problem import Links, RematProblem
from lowtide.remat.sweep import Sweep
from tests.chains import in_order
from tests.optimum import small_steps, time_bound_us
from tests.problems import unhurried
from tests.sequences import RULES, evict, linked, stored_chain


def choices(moment: Crossing) -> list[tuple[int, float]]:
    """(bytes kept, time) of every choice: each tensor that was made before is kept, made again, or away; what the node reads is free."""
    problem, base = moment.problem, moment.problem.problem
    own = set(base.reads.ids[base.reads.ptr[moment.node] : base.reads.ptr[moment.node + 1]].tolist())
    tensors, found = np.flatnonzero(moment.present).tolist(), []
    for ways in product(("kept", "again", "away"), repeat=len(tensors)):
        there = {tensor: way for tensor, way in zip(tensors, ways, strict=True) if way != "away"}
        runs = {int(base.producer[tensor]) for tensor, way in there.items() if way == "again"}
        read = {tensor for run in runs if run >= 0 for tensor in base.reads.ids[base.reads.ptr[run] : base.reads.ptr[run + 1]].tolist()}
        possible = all(run >= 0 and problem.repeatable[run] for run in runs)
        if possible and (set(np.flatnonzero(moment.wanted).tolist()) | read) <= there.keys():
            held_bytes = sum(int(base.tensor_bytes[tensor]) for tensor, way in there.items() if way == "kept" and tensor not in own)
            found.append((held_bytes, float(sum(problem.cost_us[run] for run in runs))))
    return found


@pytest.mark.parametrize("number", range(12))
def test_corners_are_the_hull_of_all_choices(number: int) -> None:
    problem = list(small_steps(number + 1))[-1]
    for node in range(problem.problem.node_count):
        moment = Crossing.of(problem, node)
        every = choices(moment)
        for corner in moment.corners:
            assert (corner.held_bytes, corner.again_us) in every
        for price in np.geomspace(0.01, 100, 30):
            best = min(nbytes * price + us for nbytes, us in every)
            assert min(each.held_bytes * price + each.again_us for each in moment.corners) == pytest.approx(best)


def test_a_corner_counts_what_else_has_to_run() -> None:
    """Of a chain of which only the end is wanted, nothing but the end is kept, or all of it runs again."""
    problem = stored_chain(3)
    again = dataclasses.replace(problem, links=None, repeatable=np.arange(6) < 3)
    moment = Crossing.of(again, 3)  # the first node of the backward pass reads the last layer's result; two more are wanted
    assert [(each.held_bytes, each.again_us) for each in moment.corners] == [(200, 0.0), (0, 20.0)]
    assert moment.least_us(100, 0.0) == pytest.approx(10.0)
    assert moment.least_us(100, 50.0) == pytest.approx(2.0)  # the other hundred bytes go over a link that carries fifty in a microsecond


@unhurried
@given(linked(), st.floats(0, 1), st.sampled_from(RULES))
def test_no_sequence_that_swaps_beats_the_bound(made, share: float, rule: ScoreWeights) -> None:
    case, problem, order = made
    base = np.array(order, np.int32)
    plain = cost_of(problem, base)
    limit_bytes = int(case.resident_bytes + share * (plain.peak_bytes - case.resident_bytes))
    found = evict(problem, base, limit_bytes, rule)
    if found is not None:
        cost = cost_of(problem, found.sequence)
        assert time_bound_us(problem, cost.peak_bytes) <= cost.time_us * (1 + 1e-9)


def test_nothing_that_a_search_finds_beats_the_bound() -> None:
    """Of little training steps whose results may be swapped at different speeds."""
    for number, problem in enumerate(small_steps(8)):
        sizes = problem.problem.tensor_bytes.astype(np.float64)
        links = Links(problem.problem.producer >= 0, sizes * (1 + number % 4), sizes * (1 + number % 3))
        swapping, order = dataclasses.replace(problem, links=links), in_order(problem)
        bound = TimeBound(swapping)
        for point in Sweep(levels=12, max_states=600).explore([swapping], [[order]]).points:
            assert bound.us(point.peak_bytes) <= point.time_us * (1 + 1e-9)


def test_a_slow_link_is_part_of_the_bound() -> None:
    """Nothing can be made again, and each copy takes as long as ten operators: the bound knows how few fit into the time."""
    problem = stored_chain(6)
    assert problem.links is not None
    slow = dataclasses.replace(problem, links=dataclasses.replace(problem.links, store_us=np.full(12, 100.0), load_us=np.full(12, 100.0)))
    order = np.arange(12, dtype=np.int32)
    found = evict(slow, order, 300, ScoreWeights(store_above=0.0))
    assert found is not None
    took_us, least_us = cost_of(slow, found.sequence).time_us, time_bound_us(slow, 300)
    assert 120 + 200 < least_us <= took_us
    assert time_bound_us(problem, 300) < least_us


def test_less_memory_never_has_a_lower_bound() -> None:
    for problem in small_steps(6):
        bound = TimeBound(problem)
        assert isinstance(problem, RematProblem)
        times = [bound.us(limit) for limit in range(problem.problem.resident_bytes, 40)]
        assert times == sorted(times, reverse=True)
