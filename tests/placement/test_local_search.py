import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.placement import Greedy, Portfolio
from lowtide.placement.base import placed
from lowtide.placement.local import settled
from lowtide.placement.strip import Strip
from lowtide.problems import Status
from lowtide.problems.placement import FREE, PlaceProblem
from tests.placements import least_arena_bytes, problems

FOREVER = float("inf")


def tight(parts: int, seed: int) -> PlaceProblem:
    """Rectangles cut from an arena of 1,000 bytes over 60 steps, again and again: together they fill it."""
    random = np.random.default_rng(seed)
    pieces = [(0, 1_000, 0, 60)]
    while len(pieces) < parts:
        low, high, start, end = pieces.pop(int(random.integers(len(pieces))))
        if random.random() < 0.5 and high - low > 1:
            cut = int(random.integers(low + 1, high))
            pieces += [(low, cut, start, end), (cut, high, start, end)]
        elif end - start > 1:
            cut = int(random.integers(start + 1, end))
            pieces += [(low, high, start, cut), (low, high, cut, end)]
        else:
            pieces.append((low, high, start, end))
    order = random.permutation(len(pieces))
    low, high, start, end = np.array(pieces)[order].T
    return PlaceProblem.of(high - low, start, end)


@settings(deadline=None)
@given(problems(max_buffers=7), st.integers(0, 6))
def test_what_settles_is_right_and_beneath_the_ceiling(problem: PlaceProblem, more: int) -> None:
    strip = Strip.of(problem)
    worst = Greedy("start").offsets(strip, 0)
    enough = problem.lower_bound_bytes + more
    tops = []
    for at, moves in settled(strip, worst, enough, 2_000, FOREVER):
        found = placed(problem, strip.offsets(at), Greedy())  # checks
        tops.append(strip.top_bytes(at))
        assert moves <= 2_000 + 4_000
        assert found.arena_bytes >= least_arena_bytes(problem)
    assert tops == sorted(tops, reverse=True)
    assert not tops or tops[-1] < strip.top_bytes(worst) or tops[-1] <= enough


def test_local_search_solves_what_no_single_pass_does() -> None:
    problem = tight(28, seed=20)
    assert Portfolio(max_moves=0).place(problem).status is Status.FEASIBLE
    found = Portfolio().place(problem)
    assert found.status is Status.OPTIMAL
    assert found.arena_bytes == 1_000
    assert found.stats["moves"] > 0


def test_more_moves_never_make_it_worse() -> None:
    problem = tight(120, seed=5)
    arenas = [Portfolio(max_moves=moves).place(problem).arena_bytes for moves in (0, 8_000, 40_000)]
    assert arenas == sorted(arenas, reverse=True)
    assert arenas[-1] < arenas[0]


def test_the_same_problem_gives_the_same_placement() -> None:
    problem = tight(60, seed=1)
    assert Portfolio(max_moves=8_000).place(problem) == Portfolio(max_moves=8_000).place(problem)


def test_fixed_blocks_stay_where_they_are() -> None:
    problem = tight(40, seed=2)
    whole = Portfolio().place(problem)
    fixed = np.full(problem.buffer_count, FREE)
    fixed[::4] = whole.offsets[::4]
    held = PlaceProblem.of(problem.size_bytes, problem.start, problem.end, fixed_bytes=fixed)
    found = Portfolio(max_moves=20_000).place(held)
    assert found.offsets[::4] == whole.offsets[::4]


def test_seconds_are_a_cap() -> None:
    problem = tight(300, seed=7)
    found = Portfolio(max_moves=10**12, max_seconds=0.2).place(problem)  # else it takes days, which the limit of a test ends
    assert found.arena_bytes >= 1_000


def test_a_fixed_block_in_the_only_place_ends_the_search() -> None:
    problem = PlaceProblem.of([4, 4], [0, 1], [2, 3], fixed_bytes=[2, FREE])  # a ceiling of 8 leaves no 4 bytes in one piece
    found = Portfolio(max_moves=50_000).place(problem)
    assert (found.offsets, found.arena_bytes, found.status) == ((2, 6), 10, Status.FEASIBLE)
