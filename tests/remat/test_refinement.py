"""What is refined at the end of a round is right, keeps its limits and is never worse; who stops it gets what was there."""

from __future__ import annotations

import numpy as np
import pytest

from lowtide.problems.order import Ints
from lowtide.remat.archive import Archive
from lowtide.remat.cost import cost_of, price_of
from lowtide.remat.problem import RematProblem
from lowtide.remat.refinement import Refinement
from lowtide.remat.sweep import Sweep
from tests.chains import in_order
from tests.sequences import layered


def known(nodes: int) -> tuple[RematProblem, Archive, list[int]]:
    """What little effort finds of a random program, and levels over all of it."""
    problem = layered(nodes)
    order: Ints = in_order(problem)
    archive = Sweep(max_states=40).explore([problem], [[order]])
    top, least = price_of(problem, order)[0], archive.points[0].peak_bytes
    return problem, archive, [top - (top - least) * step // 12 for step in range(1, 14)]


def refined(problem: RematProblem, archive: Archive, levels: list[int], before: Archive, halted: bool = False) -> Archive:
    mine = Archive.of(archive.points)
    random = np.random.default_rng(0)
    Refinement(mine, before, [problem], 2000, 6_000_000, random, lambda: halted).refine(levels)
    return mine


@pytest.mark.parametrize("later_round", [False, True])
def test_what_is_refined_is_right_and_no_worse(later_round: bool) -> None:
    problem, archive, levels = known(60)
    better = refined(problem, archive, levels, archive if later_round else Archive())
    for point in better.points:
        cost = cost_of(problem, point.sequence)
        assert (cost.peak_bytes, cost.time_us) == (point.peak_bytes, pytest.approx(point.time_us))
    for point in archive.points:
        same = better.within(point.peak_bytes)
        assert same is not None
        assert same.time_us <= point.time_us
    assert any(better.within(point.peak_bytes).time_us < point.time_us for point in archive.points)


def test_who_stops_it_has_what_was_there() -> None:
    problem, archive, levels = known(60)

    def points(of: Archive) -> list[tuple[int, float]]:
        return [(point.peak_bytes, point.time_us) for point in of.points]

    assert points(refined(problem, archive, levels, Archive(), halted=True)) == points(archive)
