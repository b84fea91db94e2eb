"""The reference solvers against brute force, with every feature, for both questions."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.placement import Placer
from lowtide.placement.base import Placement, placed
from lowtide.placement.strip import arena_bound_bytes
from lowtide.problems import Status
from lowtide.problems.files import load_buffers
from lowtide.problems.placement import FREE, PlaceProblem, check_placement
from research.addresses import common as reference
from research.addresses import cp_sat, ilp
from research.addresses.common import Model, in_sequence
from research.addresses.cp_sat import Rectangles
from research.addresses.ilp import Addresses
from tests.placements import least_arena_bytes, meet, problems

DATA = Path(__file__).parents[1] / "data" / "place"
PLACERS = [Rectangles(), *(Addresses(solver) for solver in ("highs", "scip", "cp-sat"))]  # type: ignore[arg-type]


class Stacked:
    """The worst of all right placements: nothing shares a byte, and room is left for alignment."""

    def place(self, problem: PlaceProblem, capacity_bytes: int | None = None) -> Placement:
        is_fixed = problem.fixed_bytes != FREE
        offsets, top = problem.fixed_bytes.copy(), int((problem.fixed_bytes + problem.size_bytes)[is_fixed].max(initial=0))
        for buffer in np.flatnonzero(~is_fixed).tolist():
            align = int(problem.align_bytes[buffer])
            offsets[buffer] = -(-top // align) * align
            top = int(offsets[buffer] + problem.size_bytes[buffer])
        return placed(problem, offsets, self, capacity_bytes=capacity_bytes, bound_bytes=arena_bound_bytes(problem))


def unaided(limit: int | None = None) -> object:
    """Without a heuristic that may have found the answer already; and with coarse units."""
    values = {"first_placement": lambda problem, capacity: Stacked().place(problem, capacity)}
    if limit is not None:
        values["_LIMIT_UNITS"] = limit  # type: ignore[assignment]
    return _Patched(values)


class _Patched:
    def __init__(self, values: dict[str, object]) -> None:
        self.patches = [patch.multiple(module, **values) for module in (cp_sat, ilp)]

    def __enter__(self) -> None:
        for each in self.patches:
            each.start()

    def __exit__(self, *_: object) -> None:
        for each in self.patches:
            each.stop()


@pytest.mark.parametrize("placer", PLACERS, ids=repr)
@settings(max_examples=20)
@given(problem=problems(max_buffers=6))
def test_the_smallest_arena_is_found_and_proven(placer: Placer, problem: PlaceProblem) -> None:
    with unaided():
        found = placer.place(problem)
    check_placement(problem, found.offsets, found.arena_bytes)
    assert (found.arena_bytes, found.lower_bound_bytes, found.status) == (*[least_arena_bytes(problem)] * 2, Status.OPTIMAL)


@pytest.mark.parametrize("placer", PLACERS, ids=repr)
@settings(max_examples=20)
@given(problem=problems(max_buffers=6), room=st.integers(-3, 3))
def test_what_fits_is_placed_and_what_cannot_is_proven(placer: Placer, problem: PlaceProblem, room: int) -> None:
    least = least_arena_bytes(problem)
    with unaided():
        found = placer.place(problem, max(0, least + room))
    if room >= 0:
        check_placement(problem, found.offsets, least + room)
        assert found.fits
    else:
        assert (found.status, found.fits) == (Status.INFEASIBLE if least else Status.OPTIMAL, not least)
        assert found.lower_bound_bytes <= least


@pytest.mark.parametrize("placer", [Rectangles(), Addresses("scip"), Addresses("cp-sat")], ids=repr)
@settings(max_examples=20)
@given(problem=problems(max_buffers=6, max_bytes=40), limit=st.integers(1, 12), room=st.none() | st.integers(-9, 9))
def test_rounded_sizes_keep_the_bound_below_the_truth(placer: Placer, problem: PlaceProblem, limit: int, room: int | None) -> None:
    least = least_arena_bytes(problem)
    with unaided(limit):
        found = placer.place(problem, None if room is None else max(0, least + room))
    check_placement(problem, found.offsets, found.arena_bytes)
    assert found.lower_bound_bytes <= least <= found.arena_bytes
    assert (found.status is not Status.INFEASIBLE) or (room is not None and room < 0)


@given(problems())
def test_a_model_keeps_what_can_be_in_the_way_and_loses_nothing_where_it_is_exact(problem: PlaceProblem) -> None:
    model = Model.of(problem, least_arena_bytes(problem), 2**40)
    assert model.exact
    kept = [each for each in range(problem.buffer_count) if problem.size_bytes[each] and problem.start[each] < problem.end[each]]
    assert model.buffers.tolist() == kept
    assert (model.size * model.unit_bytes).tolist() == problem.size_bytes[kept].tolist()
    pairs = {frozenset((kept[one], kept[other])) for one, other in model.pairs.tolist()}
    assert pairs == {frozenset((one, other)) for one in kept for other in kept if one < other and meet(problem, one, other)}
    assert len(model.pairs) == len(pairs) == model.pair_count


@given(problems(max_buffers=6))
def test_the_sequence_of_a_right_placement_gives_no_larger_arena(problem: PlaceProblem) -> None:
    stacked = Stacked().place(problem)
    offsets = in_sequence(problem, np.argsort(stacked.offsets, kind="stable").tolist())
    check_placement(problem, offsets, stacked.arena_bytes)


@pytest.mark.parametrize("placer", PLACERS, ids=repr)
def test_the_example_of_minimalloc(placer: Placer) -> None:
    problem = load_buffers(DATA / "example.12.csv")
    with unaided():
        found = placer.place(problem)
        assert placer.place(problem) == found
        assert (found.arena_bytes, found.status) == (12, Status.OPTIMAL)
        assert placer.place(problem, 11).status is Status.INFEASIBLE
        assert found.stats


@pytest.mark.parametrize("placer", [Rectangles(max_buffers=4), Addresses(max_pairs=5)], ids=repr)
def test_models_that_are_too_large_are_not_built(placer: Placer) -> None:
    with unaided():
        found = placer.place(load_buffers(DATA / "example.12.csv"))
    assert (found.arena_bytes, found.status, found.stats) == (20, Status.FEASIBLE, {})


@pytest.mark.parametrize("placer", [Rectangles(), Addresses()], ids=repr)
@settings(max_examples=30)
@given(problem=problems(max_buffers=5), room=st.none() | st.integers(-3, 3))
def test_with_the_heuristics_the_answers_are_the_same(placer: Placer, problem: PlaceProblem, room: int | None) -> None:
    least = least_arena_bytes(problem)
    found = placer.place(problem, None if room is None else max(0, least + room))
    assert found.lower_bound_bytes <= least
    assert found.fits == (room is None or room >= 0 or least == 0)
    assert room is not None or found.arena_bytes == least


def test_a_problem_above_its_bound_is_proven() -> None:
    sizes = [5, 5, 2, 3, 1, 4, 1, 1, 4, 7]
    starts, ends = zip((0, 3), (2, 5), (3, 5), (0, 2), (2, 6), (4, 6), (2, 4), (0, 1), (1, 2), (5, 6), strict=True)
    problem = PlaceProblem.of(sizes, starts, ends)
    assert problem.lower_bound_bytes == 12
    for placer in PLACERS:
        assert (placer.place(problem).lower_bound_bytes, placer.place(problem).status) == (13, Status.OPTIMAL)
        assert (placer.place(problem, 12).status, placer.place(problem, 13).arena_bytes) == (Status.INFEASIBLE, 13)


def test_a_solver_whose_answer_overlaps_is_not_believed() -> None:
    problem = PlaceProblem.of([4, 4], [0, 0], [1, 1])
    first = Stacked().place(problem)
    model = Model.of(problem, first.arena_bytes, 100)
    found = reference.answered(problem, Rectangles(), model, first, reference.Found((0.0, 1e-6)), None)
    assert sorted(found.offsets) == [0, 4]


@pytest.mark.parametrize("placer", [Rectangles(), Addresses("highs"), Addresses("cp-sat")], ids=repr)
def test_huge_sizes_are_placed_without_overflow(placer: Placer) -> None:
    sizes = [2**58 + each for each in (1, 7, 30, 5, 11)]
    problem = PlaceProblem.of(sizes, [0, 3, 0, 9, 0], [3, 9, 9, 2**61, 2**61])
    with unaided():
        found = placer.place(problem)
    assert found.lower_bound_bytes == problem.lower_bound_bytes <= found.arena_bytes < problem.lower_bound_bytes + 60
