import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from lowtide.placement import answers
from lowtide.placement.exact import CapacityQuestion, Exact, Switches
from lowtide.placement.search import NO
from lowtide.placement.sections import cut
from lowtide.problems import Status
from lowtide.problems.placement import PlaceProblem, check_placement
from tests.placements import least_arena_bytes, problems

DATA = Path(__file__).parents[1] / "data" / "place"
SWITCHES = ("canonical", "inference", "lifting", "decomposition", "dynamic", "symmetry", "memory", "restarts")


def load(name: str) -> PlaceProblem:
    rows = list(csv.DictReader((DATA / name).read_text().splitlines()))
    column = {key: [int(row[key]) for row in rows] for key in ("lower", "upper", "size")}
    return PlaceProblem.of(column["size"], column["lower"], column["upper"], names=[row["id"] for row in rows])


def scattered(count: int, seed: int = 0) -> PlaceProblem:
    """Buffers of all sizes, too many to be placed within their bound by luck."""
    random = np.random.default_rng(seed)
    start = random.integers(0, 2 * count, count)
    return PlaceProblem.of(random.integers(1, 1_000, count), start, start + random.integers(1, count, count))


def check_both_questions(problem: PlaceProblem, placer: Exact) -> None:
    least = least_arena_bytes(problem)
    best = placer.place(problem)
    assert (best.arena_bytes, best.lower_bound_bytes, best.status) == (least, least, Status.OPTIMAL)
    check_placement(problem, best.offsets, least)
    fitting = placer.place(problem, least)
    assert (fitting.arena_bytes, fitting.fits) == (least, True)
    check_placement(problem, fitting.offsets, least)
    if least:
        failing = placer.place(problem, least - 1)
        assert (failing.status, failing.lower_bound_bytes) == (Status.INFEASIBLE, least)


@settings(max_examples=150, deadline=None)
@given(problems())
def test_the_smallest_arena_of_all(problem: PlaceProblem) -> None:
    check_both_questions(problem, Exact())


@pytest.mark.parametrize("switch", SWITCHES)
@settings(max_examples=40, deadline=None)
@given(problem=problems())
def test_answers_stay_right_without_a_technique(switch: str, problem: PlaceProblem) -> None:
    check_both_questions(problem, replace(Exact(), **{switch: False}))


@settings(max_examples=40, deadline=None)
@given(problems())
def test_answers_stay_right_without_any_technique(problem: PlaceProblem) -> None:
    check_both_questions(problem, replace(Exact(), **dict.fromkeys(SWITCHES, False)))


@pytest.mark.parametrize("name", ["E", "H", "K"])
def test_tight_instances_of_a_compiler_fit(name: str) -> None:
    found = Exact(max_nodes=20_000).place(load(f"{name}.1048576.csv"), 2**20)
    assert (found.status, found.arena_bytes) == (Status.OPTIMAL, 2**20)


def test_the_example_of_twelve_bytes() -> None:
    found = Exact().place(load("example.12.csv"))
    assert (found.status, found.arena_bytes) == (Status.OPTIMAL, 12)


def test_the_same_answer_every_time() -> None:
    problem = load("K.1048576.csv")
    placer = Exact(max_nodes=1_500, memory=False)
    first = placer.place(problem)
    assert first.stats["nodes"] > 500
    assert placer.place(problem) == first


@pytest.mark.parametrize("nodes", [0, 1, 5, 700, 3_000])
def test_effort_ends_the_search(nodes: int) -> None:
    problem = load("K.1048576.csv")
    found = Exact(max_nodes=nodes, restarts=False, inference=False).place(problem, 2**20)
    assert (found.status, found.lower_bound_bytes, found.stats["nodes"]) == (Status.UNKNOWN, 2**20, nodes)
    check_placement(problem, found.offsets, found.arena_bytes)


def test_seconds_and_looks_and_cells_are_caps() -> None:
    problem = load("K.1048576.csv")
    for placer in (Exact(max_seconds=0), Exact(max_looks=0), Exact(max_cells=100)):
        found = placer.place(problem, 2**20)
        assert (found.status, found.stats["nodes"]) == (Status.UNKNOWN, 0)


def test_answers_get_better_all_the_time() -> None:
    problem = scattered(24, seed=3)
    said = list(answers(problem, Exact(max_nodes=20_000)))
    arenas, bounds = [each.arena_bytes for each in said], [each.lower_bound_bytes for each in said]
    assert len(said) > 2
    assert arenas == sorted(arenas, reverse=True)
    assert bounds == sorted(bounds)


def test_parts_apart_are_solved_one_by_one() -> None:
    one = scattered(12, seed=5)
    count = 20
    shift = 1_000 * np.arange(count).repeat(12)
    many = PlaceProblem.of(np.tile(one.size_bytes, count), np.tile(one.start, count) + shift, np.tile(one.end, count) + shift)
    least = Exact().place(one)
    found = Exact(max_nodes=100 + 20 * least.stats["nodes"]).place(many)
    assert (found.status, found.arena_bytes) == (Status.OPTIMAL, least.arena_bytes)


def test_a_fixed_buffer_in_the_middle_splits_the_arena() -> None:
    problem = PlaceProblem.of([4, 2, 2, 3], [0, 0, 0, 0], [2, 2, 2, 1], fixed_bytes=[4, -1, -1, -1])
    found = Exact().place(problem)
    assert (found.status, found.arena_bytes, found.offsets[0]) == (Status.OPTIMAL, 11, 4)


def test_idle_buffers_need_room_too() -> None:
    problem = PlaceProblem.of([8, 3, 0], [1, 0, 0], [1, 2, 5], fixed_bytes=[-1, -1, 20])
    found = Exact().place(problem)
    assert (found.status, found.arena_bytes) == (Status.OPTIMAL, 20)
    assert Exact().place(problem, 19).status is Status.INFEASIBLE


def test_a_search_deeper_than_there_are_buffers_grows_its_stack() -> None:
    problem = PlaceProblem.of([401, 403], [0, 0], [1, 1])
    found = replace(Exact(), **dict.fromkeys(SWITCHES, False)).place(problem, 803)
    assert (found.status, found.lower_bound_bytes) == (Status.INFEASIBLE, 804)
    question = CapacityQuestion(cut(problem), Switches(*[False] * len(SWITCHES)), 803)
    assert question.go_on(100_000) == NO
    assert len(question.stack.branching) > 300
