import math
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.placement import Greedy, Placement, Portfolio, answers, arena_bound_bytes, fitting, greedy
from lowtide.placement.base import placed
from lowtide.placement.fitting import FITS, ORDERS, FitRule, Order, sequence
from lowtide.placement.greedy import FreeLists
from lowtide.placement.strip import Strip
from lowtide.problems import Status
from lowtide.problems.placement import FREE, PlaceProblem
from tests.placements import least_arena_bytes, meet, problems

unhurried = settings(deadline=None)


def nested(count: int) -> PlaceProblem:
    """Like a training step: lives within lives, kept results born on the way back, and a short one at each step."""
    forward = [(64 + step % 7, step, 2 * count - step) for step in range(count)]
    results = [(16, count + step, 2 * count) for step in range(count)]
    short = [(5, step, step + 1) for step in range(2 * count)]
    return PlaceProblem.of(*zip(*(forward + results + short), strict=True))


def check(problem: PlaceProblem, found: Placement) -> None:
    """By definition, pair by pair."""
    for one in range(problem.buffer_count):
        assert found.offsets[one] % problem.align_bytes[one] == 0
        assert problem.fixed_bytes[one] in (FREE, found.offsets[one])
        for other in range(one):
            low, high = sorted((one, other), key=lambda each: found.offsets[each])
            assert not meet(problem, one, other) or found.offsets[low] + problem.size_bytes[low] <= found.offsets[high]


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("order", ORDERS)
@settings(deadline=None, max_examples=15)
@given(problem=problems(max_buffers=9))
def test_every_order_and_fit_gives_a_right_placement(order: str, fit: str, problem: PlaceProblem) -> None:
    found = Greedy(order, fit).place(problem)
    check(problem, found)
    assert found.arena_bytes >= found.lower_bound_bytes == arena_bound_bytes(problem)


@unhurried
@given(problems(max_buffers=6))
def test_no_arena_is_below_the_bound(problem: PlaceProblem) -> None:
    assert problem.lower_bound_bytes <= arena_bound_bytes(problem) <= least_arena_bytes(problem)


def test_the_bound_knows_what_alignment_loses() -> None:
    problem = PlaceProblem.of([5, 5, 7, 3], [0, 0, 0, 1], [2, 2, 1, 2], align_bytes=[4, 8, 4, 4])
    assert problem.lower_bound_bytes == 17
    assert arena_bound_bytes(problem) == 8 + 8 + 8 - 3  # of the three alive at step 0 the first two lose 3 bytes each, the highest none
    assert Portfolio().place(problem).arena_bytes == 21


@unhurried
@given(problems(max_buffers=6))
def test_the_portfolio_is_best_on_small_problems(problem: PlaceProblem) -> None:
    found = Portfolio(max_moves=2_000).place(problem)
    check(problem, found)
    least = least_arena_bytes(problem)
    assert least <= found.arena_bytes <= 2 * least
    assert found.status is (Status.OPTIMAL if found.arena_bytes == found.lower_bound_bytes else Status.FEASIBLE)


@unhurried
@given(problems(max_buffers=7), st.integers(0, 40))
def test_the_portfolio_answers_whether_a_capacity_suffices(problem: PlaceProblem, capacity_bytes: int) -> None:
    found = Portfolio(max_moves=2_000).place(problem, capacity_bytes)
    if found.fits:
        check(problem, found)
        assert found.arena_bytes <= capacity_bytes
    elif found.status is Status.INFEASIBLE:
        assert least_arena_bytes(problem) > capacity_bytes
    else:
        assert found.status is Status.UNKNOWN
        assert found.arena_bytes > capacity_bytes


@unhurried
@given(problems(max_buffers=8))
def test_answers_get_better_and_end_with_the_placement(problem: PlaceProblem) -> None:
    found = list(answers(problem, Portfolio(max_moves=2_000)))
    arenas = [each.arena_bytes for each in found]
    assert arenas == sorted(arenas, reverse=True)
    assert found[-1] == Portfolio(max_moves=2_000).place(problem)


def test_lives_like_those_of_a_training_step_meet_the_bound_at_once() -> None:
    found = Portfolio(max_moves=0).place(nested(200))
    assert found.status is Status.OPTIMAL


def test_the_order_of_buffers_does_not_matter_where_keys_differ() -> None:
    problem = PlaceProblem.of([9, 4, 6, 2], [0, 1, 2, 0], [4, 3, 6, 7])
    turned = [3, 1, 0, 2]
    other = PlaceProblem.of(problem.size_bytes[turned], problem.start[turned], problem.end[turned])
    for order in ("size", "area", "lifetime"):
        assert np.array_equal(np.array(turned)[sequence(Strip.of(other), order)], sequence(Strip.of(problem), order))


def test_fixed_buffers_come_first() -> None:
    problem = PlaceProblem.of([8, 1, 2], [0, 0, 0], [4, 4, 4], fixed_bytes=[FREE, 3, FREE])
    assert all(sequence(Strip.of(problem), order)[0] == 1 for order in ORDERS)
    assert Greedy("size").place(problem).offsets == (4, 3, 0)


def test_steps_far_apart_cost_nothing() -> None:
    problem = PlaceProblem.of([4, 4, 4], [-(2**60), 0, 2**60], [1, 2**60, 2**61])
    found = Portfolio().place(problem)
    assert found.arena_bytes == found.lower_bound_bytes == 8


def test_nothing_to_place_needs_no_arena() -> None:
    for problem in (PlaceProblem.of([], [], []), PlaceProblem.of([0], [0], [3])):
        found = Portfolio().place(problem)
        assert (found.arena_bytes, found.status) == (0, Status.OPTIMAL)


def test_a_buffer_without_a_life_lies_in_the_arena_all_the_same() -> None:
    found = Portfolio().place(PlaceProblem.of([5, 3], [0, 2], [1, 2], fixed_bytes=[FREE, 4]))
    assert (found.offsets, found.arena_bytes, found.status) == ((0, 4), 7, Status.OPTIMAL)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="order: expected one of 'size'"):
        Greedy("weight")
    with pytest.raises(ValueError, match="fit: expected one of 'first'"):
        Greedy("size", "worst")


@settings(deadline=None, max_examples=60)
@given(problems(max_buffers=12), st.sampled_from(ORDERS), st.sampled_from(FITS), st.integers(1, 60))
def test_the_clock_is_looked_at_without_another_answer(problem: PlaceProblem, order: Order, fit: FitRule, looks: int) -> None:
    strip, placer = Strip.of(problem), Greedy(order, fit)
    expected = placer.offsets(strip, problem.lower_bound_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "_CHUNK_LOOKS", looks)
        assert (placer.offsets(strip, problem.lower_bound_bytes) == expected).all()
        late = placer.place_by(-math.inf, problem)  # which is checked
    assert late.fits
    assert late.stats.get("stacked", 0) <= max(strip.count - 1, 0)


def test_a_pass_ends_soon_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # What one pass takes is quadratic: here some thousands of chunks of it, between which the clock is looked at.
    monkeypatch.setattr(fitting, "_CHUNK_LOOKS", 1000)
    ticks = count()
    monkeypatch.setattr(fitting, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    n = 3000
    problem = PlaceProblem.of([1] * n, range(n), range(2 * n, n, -1))
    found = Greedy("size").place_by(10, problem)
    assert found.fits
    assert found.stats["stacked"] > n // 2
    assert next(ticks) < 20


@unhurried
@given(problems(max_buffers=7))
def test_free_lists_place_what_is_not_fixed_as_time_goes_on_and_backward(problem: PlaceProblem) -> None:
    strip = Strip.of(problem)
    for placer in (FreeLists(), FreeLists(backward=True)):
        at = placer.offsets(strip)
        assert (at is None) == bool((strip.blocks.fixed != FREE).any())
        if at is not None:
            placed(problem, strip.offsets(at), placer)  # checks


def test_free_lists_join_what_is_free_again():
    """Two of 4 bytes go, and one of 8 lies in their place, above the one that stays; for the next one the arena grows."""
    problem = PlaceProblem.of([4, 4, 2, 8, 3], [0, 0, 0, 3, 4], [2, 3, 9, 9, 6])
    at = FreeLists().offsets(Strip.of(problem))
    assert at is not None
    assert at.tolist() == [6, 2, 0, 2, 10]


def test_what_is_too_large_for_quadratic_passes_is_placed_as_time_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greedy, "_MAX_LOOKS", 10)
    random = np.random.default_rng(0)
    start = random.integers(0, 300, 400)
    problem = PlaceProblem.of(random.integers(1, 100, 400), start, start + random.integers(1, 30, 400), align_bytes=8)
    found = Portfolio().place(problem)  # checks
    assert found.solver.startswith("FreeLists(")
    assert found.arena_bytes < 1.3 * found.lower_bound_bytes
    fixed = PlaceProblem.of([1] * 8, [0] * 8, [1] * 8, fixed_bytes=[3, *[FREE] * 7])
    assert Portfolio().place(fixed).arena_bytes == 8
