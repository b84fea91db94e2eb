"""Buffers that are placed without a search: rightly, and in not much more than they need."""

from __future__ import annotations

from hypothesis import given, settings

from lowtide.cpu import executable as holding
from lowtide.cpu.executable import lowest
from lowtide.problems.placement import PlaceProblem, check_placement
from tests.placements import problems


@settings(deadline=None)
@given(problems(max_buffers=12, max_step=8, fixed=False))
def test_it_is_right(problem: PlaceProblem) -> None:
    offsets, arena_bytes = lowest(problem)
    check_placement(problem, offsets, arena_bytes)
    spent = problem.size_bytes + problem.align_bytes - 1
    assert arena_bytes <= int(spent.sum())


def test_what_never_lives_together_lies_in_one_place() -> None:
    chain = PlaceProblem.of([4, 6, 4, 6], [0, 1, 2, 3], [2, 3, 4, 5])  # each lives with the next
    assert lowest(chain)[1] == 10
    assert lowest(PlaceProblem.of([], [], []))[1] == 0


def test_offsets_that_do_not_fit_are_found_anew(monkeypatch) -> None:
    problem = PlaceProblem.of([4, 6, 4], [0, 1, 2], [2, 3, 4])
    assert holding.placing_as([0, 4, 0])(problem) == ([0, 4, 0], 10)
    for wrong in ([], [0, 3, 0], [0, 4], [0, 4, 5]):
        offsets, arena_bytes = holding.placing_as(wrong)(problem)
        check_placement(problem, offsets, arena_bytes)
        assert arena_bytes == 10
    monkeypatch.setattr(holding, "_MOST_BUFFERS", 2)  # where a search is worth its memory
    offsets, arena_bytes = holding.placing_as([])(problem)
    check_placement(problem, offsets, arena_bytes)
