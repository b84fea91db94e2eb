import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from lowtide.ir.placement import FREE, PlaceProblem
from lowtide.ir.placement_check import check_placement
from lowtide.place import Placement, Status, answers
from lowtide.place.exact import Exact
from tests.placements import least_arena_bytes, problems

DATA = Path(__file__).parents[1] / "data" / "place"
SWITCHES = ("canonical", "inference", "lifting", "decomposition", "dynamic", "symmetry", "memory", "restarts")
ENOUGH = Exact()


def load(name: str) -> PlaceProblem:
    rows = list(csv.DictReader((DATA / name).read_text().splitlines()))
    column = {key: [int(row[key]) for row in rows] for key in ("lower", "upper", "size")}
    return PlaceProblem.of(column["size"], column["lower"], column["upper"], names=[row["id"] for row in rows])


def check_both_questions(problem: PlaceProblem, placer: Exact) -> None:
    least = least_arena_bytes(problem)
    best = placer.place(problem)
    assert (best.arena_bytes, best.lower_bound_bytes, best.status) == (least, least, Status.OPTIMAL)
    check_placement(problem, best.offsets, least)
    fitting = placer.place(problem, least)
    assert fitting.fits and fitting.arena_bytes == least
    check_placement(problem, fitting.offsets, least)
    if least:
        failing = placer.place(problem, least - 1)
        assert failing.status is Status.INFEASIBLE and failing.lower_bound_bytes == least


@settings(max_examples=500, deadline=None)
@given(problems())
def test_the_smallest_arena_of_all(problem: PlaceProblem) -> None:
    check_both_questions(problem, ENOUGH)


@pytest.mark.parametrize("switch", SWITCHES)
@settings(max_examples=80, deadline=None)
@given(problem=problems())
def test_answers_stay_right_without_a_technique(switch: str, problem: PlaceProblem) -> None:
    check_both_questions(problem, replace(ENOUGH, **{switch: False}))


@settings(max_examples=80, deadline=None)
@given(problems())
def test_answers_stay_right_without_any_technique(problem: PlaceProblem) -> None:
    check_both_questions(problem, replace(ENOUGH, **dict.fromkeys(SWITCHES, False)))
