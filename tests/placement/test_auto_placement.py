import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.placement import AUTO, Auto, answers, place
from lowtide.problems import Status
from lowtide.problems.placement import PlaceProblem, components, subproblem_of
from tests.placements import least_arena_bytes, meet, problems

unhurried = settings(deadline=None)


@unhurried
@given(problems(max_buffers=7, max_step=9))
def test_small_problems_get_the_smallest_arena(problem: PlaceProblem) -> None:
    found = place(problem)
    assert found.status is Status.OPTIMAL
    assert found.arena_bytes == found.lower_bound_bytes == least_arena_bytes(problem)


@unhurried
@given(problems(max_buffers=7, max_step=9), st.integers(0, 40))
def test_whether_a_capacity_suffices_is_proven_either_way(problem: PlaceProblem, capacity_bytes: int) -> None:
    found = place(problem, capacity_bytes=capacity_bytes)
    assert found.fits == (least_arena_bytes(problem) <= capacity_bytes)
    assert found.fits or found.status is Status.INFEASIBLE
    assert not found.fits or found.arena_bytes <= capacity_bytes


@unhurried
@given(problems(max_buffers=7, max_step=9), st.sampled_from([None, 12]))
def test_answers_never_get_worse(problem: PlaceProblem, capacity_bytes: int | None) -> None:
    found = list(answers(problem, AUTO, capacity_bytes))
    arenas, bounds = [each.arena_bytes for each in found if each.offsets], [each.lower_bound_bytes for each in found]
    assert arenas == sorted(arenas, reverse=True)
    assert bounds == sorted(bounds)
    assert found[-1] == place(problem, capacity_bytes=capacity_bytes)


@given(problems(max_buffers=8, max_step=12))
def test_parts_share_no_step_and_hold_all_that_need_bytes(problem: PlaceProblem) -> None:
    apart = components(problem)
    held = np.concatenate([*apart, []]).astype(int)
    needed = np.flatnonzero((problem.size_bytes > 0) & (problem.start < problem.end))
    assert sorted(held.tolist()) == needed.tolist()
    part = {buffer: index for index, each in enumerate(apart) for buffer in each.tolist()}
    for one in needed:
        for other in needed:
            assert not meet(problem, one, other) or part[one] == part[other]
    for each in apart:
        assert len(components(subproblem_of(problem, each))) == 1


def test_hard_parts_are_solved_one_by_one() -> None:
    sizes, lives = [4] * 5, [(0, 3), (3, 9), (0, 9), (9, 21), (0, 21)]  # 12 bytes alive at most, and an arena of 12 does not hold them
    lone = PlaceProblem.of(sizes, *zip(*lives, strict=True))
    twice = PlaceProblem.of(sizes * 2, *zip(*(lives + [(start + 30, end + 30) for start, end in lives]), strict=True))
    assert place(twice).arena_bytes == place(lone).arena_bytes == least_arena_bytes(lone)
    assert place(twice).status is Status.OPTIMAL


def test_a_part_is_solved_no_further_than_the_largest_needs() -> None:
    sizes, lives = [4] * 5, [(0, 3), (3, 9), (0, 9), (9, 21), (0, 21)]
    problem = PlaceProblem.of([100, *sizes], *zip((40, 41), *lives, strict=True))
    found = place(problem)
    assert (found.arena_bytes, found.status) == (100, Status.OPTIMAL)
    assert found.stats == {"placements": 1}


def test_many_parts_take_no_search_each() -> None:
    count = 20_000
    start = np.repeat(np.arange(count // 2) * 3, 2)
    found = place(PlaceProblem.of(np.tile([3, 5], count // 2), start, start + 2))
    assert (found.arena_bytes, found.status) == (8, Status.OPTIMAL)


def test_seconds_are_a_cap_and_the_answer_is_right() -> None:
    random = np.random.default_rng(0)
    start = random.integers(0, 500, 400)
    problem = PlaceProblem.of(random.integers(1, 1000, 400), start, start + random.integers(1, 100, 400))
    assert Auto(max_seconds=0.0).place(problem).arena_bytes >= problem.lower_bound_bytes
