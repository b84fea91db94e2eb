from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import FormatError
from lowtide.placement import place
from lowtide.placement.greedy import Greedy, Portfolio
from lowtide.problems import Status
from lowtide.problems.placement import FREE, PlaceProblem, check_placement, subproblem_of
from research.addresses.spaces import Space, SpacedPlacement, SpacedProblem, place_in_spaces
from tests.placements import least_arena_bytes, problems

FAST, SLOW = Space("fast", 12), Space("slow")


@st.composite
def spaced_problems(draw: st.DrawFn) -> SpacedProblem:
    buffers = draw(problems(max_buffers=5))
    spaces = [Space(f"space{index}", draw(st.sampled_from([None, 4, 8, 16]))) for index in range(draw(st.integers(1, 3)))]
    allowed = []
    for fixed in buffers.fixed_bytes.tolist():
        some = draw(st.sets(st.integers(0, len(spaces) - 1), min_size=1))
        allowed.append(sorted(some)[: 1 if fixed != FREE else None])
    benefit = [draw(st.integers(0, 9)) for _ in allowed]
    return SpacedProblem.of(buffers, spaces, allowed, benefit)


def check(problem: SpacedProblem, found: SpacedPlacement) -> None:
    """Each space by itself, by a checker that knows nothing of spaces."""
    space = np.array(found.space, int)
    for index, (each, arena_bytes) in enumerate(zip(problem.spaces, found.arena_bytes, strict=True)):
        here = np.flatnonzero(space == index)
        assert each.capacity_bytes is None or arena_bytes <= each.capacity_bytes
        check_placement(subproblem_of(problem.buffers, here), [found.offsets[buffer] for buffer in here], arena_bytes)
    assert all(where in allowed for where, allowed in zip(found.space, problem.allowed, strict=True))


@settings(deadline=None)
@given(spaced_problems())
def test_what_is_placed_is_right_and_what_is_said_to_be_impossible_is(problem: SpacedProblem) -> None:
    found = place_in_spaces(problem, Portfolio(max_moves=1_000))
    if found.status in (Status.OPTIMAL, Status.FEASIBLE):
        check(problem, found)
        assert not found.stuck
        ahead = [index for index, where in enumerate(found.space) if where < problem.allowed[index][-1]]
        assert found.benefit == problem.benefit[ahead].sum()
    else:
        assert found.stuck
        assert found.status is not Status.INFEASIBLE or not _possible(problem)


def _possible(problem: SpacedProblem) -> bool:
    """By brute force over who lives where."""
    for choice in product(*problem.allowed):
        space = np.array(choice, int)
        fits = (
            each.capacity_bytes is None
            or least_arena_bytes(subproblem_of(problem.buffers, np.flatnonzero(space == index))) <= each.capacity_bytes
            for index, each in enumerate(problem.spaces)
        )
        if all(fits):
            return True
    return False


@settings(deadline=None)
@given(problems(max_buffers=7), st.sampled_from([None, 4, 9, 14]))
def test_one_space_is_place(buffers: PlaceProblem, capacity_bytes: int | None) -> None:
    placer = Portfolio(max_moves=1_000)
    found, alone = (
        place_in_spaces(SpacedProblem.of(buffers, [Space("only", capacity_bytes)]), placer),
        place(buffers, placer, capacity_bytes),
    )
    assert (found.status, found.arena_bytes) == (alone.status, (alone.arena_bytes,))
    assert found.offsets == alone.offsets or not alone.fits


def test_the_fast_space_holds_what_gains_most_for_bytes_and_steps() -> None:
    buffers = PlaceProblem.of([8, 8, 4], [0, 0, 0], [2, 2, 2], names=["cold", "hot", "warm"])
    found = place_in_spaces(SpacedProblem.of(buffers, [FAST, SLOW], benefit=[1, 10, 2]))
    assert found.space == (1, 0, 0)
    assert (found.arena_bytes, found.benefit, found.status) == ((12, 8), 12, Status.FEASIBLE)


def test_a_short_life_gets_what_a_long_one_would_keep_from_others() -> None:
    lives = [(0, 100), *((step, step + 10) for step in range(0, 100, 10))]
    buffers = PlaceProblem.of([12] * 11, *zip(*lives, strict=True))
    found = place_in_spaces(SpacedProblem.of(buffers, [FAST, SLOW]))
    assert found.space == (1, *[0] * 10)


def test_who_must_be_in_the_fast_space_comes_first() -> None:
    buffers = PlaceProblem.of([8, 8], [0, 0], [1, 1])
    found = place_in_spaces(SpacedProblem.of(buffers, [FAST, SLOW], [[0, 1], [0]], [9, 0]))
    assert found.space == (1, 0)


def test_room_for_all_is_optimal() -> None:
    found = place_in_spaces(SpacedProblem.of(PlaceProblem.of([4, 8], [0, 0], [1, 1]), [FAST, SLOW]))
    assert (found.space, found.status) == ((0, 0), Status.OPTIMAL)


def test_what_the_placer_cannot_fit_moves_on() -> None:
    sizes, lives = (4, 4, 4, 4, 4), ((0, 3), (3, 9), (0, 9), (9, 21), (0, 21))  # 12 bytes alive at most, but no placement within 12
    buffers = PlaceProblem.of(sizes, *zip(*lives, strict=True))
    problem = SpacedProblem.of(buffers, [Space("fast", 11), SLOW])
    found = place_in_spaces(problem, Greedy("start"))
    check(problem, found)
    assert set(found.space) == {0, 1}


def test_no_room_names_who_is_stuck() -> None:
    buffers = PlaceProblem.of([8, 8, 1], [0, 1, 5], [2, 3, 6], names=["one", "two", "three"])
    found = place_in_spaces(SpacedProblem.of(buffers, [FAST]))
    assert found.status is Status.INFEASIBLE
    assert found.stuck == ("one", "two")


def test_wrong_problems_are_refused() -> None:
    buffers = PlaceProblem.of([8], [0], [1], names=["a"])
    with pytest.raises(FormatError, match=r"buffer a: expected some of the spaces 0 to 1 in ascending order, got \[1, 0\]"):
        SpacedProblem.of(buffers, [FAST, SLOW], [[1, 0]])
    with pytest.raises(FormatError, match="buffer a: expected a benefit of 0 or more, got -1"):
        SpacedProblem.of(buffers, [FAST, SLOW], benefit=[-1])
    with pytest.raises(FormatError, match="expected the spaces and the benefit of each of 1 buffers"):
        SpacedProblem.of(buffers, [FAST, SLOW], [[0], [1]])
    with pytest.raises(FormatError, match="buffer a: expected one space for a fixed offset"):
        SpacedProblem.of(PlaceProblem.of([8], [0], [1], names=["a"], fixed_bytes=[0]), [FAST, SLOW])


def test_what_is_too_large_by_itself_is_named() -> None:
    buffers = PlaceProblem.of([7, 5, 20], [4, 0, 9], [4, 2, 9], names=["fixed", "alive", "large"], fixed_bytes=[2, FREE, FREE])
    assert place_in_spaces(SpacedProblem.of(buffers, [Space("small", 8)])).stuck == ("fixed", "large")
