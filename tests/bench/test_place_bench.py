"""The placement bench: which questions it asks, and what a row says."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from bench import place as bench
from bench.place import MINIMALLOC_S, SOLVERS, Question, questions, row
from bench.results import Results, load
from lowtide.problems.placement import PlaceProblem
from research.solvers import PLACERS, parse_placer
from tests.placements import buffers_to_csv

DATA = Path(__file__).parents[1] / "data" / "place"


def test_instances_are_asked_once_and_those_of_a_known_capacity_twice(tmp_path: Path) -> None:
    shutil.copy(DATA / "example.12.csv", tmp_path)
    (tmp_path / "more-2.6B.csv").write_text(buffers_to_csv(PlaceProblem.of([1] * 99, [0] * 99, [1] * 99)))
    (tmp_path / "one.csv").write_text(buffers_to_csv(PlaceProblem.of([1], [0], [1])))
    asked = [(each.name, str(each)) for each in questions([DATA, tmp_path], ["example", "one", "more-2.6B"])]
    assert asked == [("one", "smallest"), ("example", "smallest"), ("example", "fits in 12"), ("more-2.6B", "smallest")]


@pytest.mark.parametrize(("capacity", "status"), [(None, "optimal"), (12, "optimal"), (11, "infeasible")])
def test_a_row_says_what_was_found(capacity: int | None, status: str) -> None:
    line = row(Question(DATA / "example.12.csv", capacity), "exact", 5.0)
    assert (line["buffers"], line["status"], line["lower_bound"]) == (5, status, 12)
    assert ("arena" in line) == (line["status"] == "optimal") or line["arena"] == 12
    assert line["minimalloc_cpu_s"] is None
    assert all(column in bench.COLUMNS for column in line)


def test_every_placer_is_on_the_list() -> None:
    listed = {type(parse_placer(text)) for text in SOLVERS}
    assert listed == set(PLACERS.values())
    assert all(bench._capped(parse_placer(text), 3.0) for text in SOLVERS)


def test_minimalloc_s_figures_are_those_of_its_eleven_instances() -> None:
    assert "".join(MINIMALLOC_S) == "ABCDEFGHIJK"


def test_rows_are_saved_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_in_a_process", lambda arguments, cap_s: {"status": "optimal", "cpu_s": 1.0})
    monkeypatch.setattr("bench.results.load", lambda name: load(name, tmp_path))
    monkeypatch.setattr(Results, "save", lambda self, save=Results.save: save(self, tmp_path))
    for solver, keep in (("auto", []), ("exact", ["--keep"]), ("exact", ["--keep"])):
        words = ["place", "--only", "instances", "--data", str(DATA), "--instances", "example", "--solvers", solver, *keep]
        monkeypatch.setattr(sys, "argv", words)
        bench.main()
    rows = load("place", tmp_path).rows
    assert [(line["question"], line["solver"]) for line in rows] == [
        ("smallest", "auto"), ("fits in 12", "auto"), ("smallest", "exact"), ("fits in 12", "exact"),
    ]  # fmt: skip


def test_a_row_that_fails_is_told() -> None:
    assert "missing.csv" in bench._in_a_process(["--row", "missing.csv", "auto", ""], 5.0)
    (line,) = [bench._in_a_process(["--row", str(DATA / "example.12.csv"), "greedy", ""], 5.0)]
    assert json.loads(json.dumps(line))["status"] == "optimal"


def test_a_training_step_is_placed_at_both_alignments() -> None:
    lines = bench.model_rows("alexnet", 1)
    assert [line["alignment"] for line in lines] == [1, 64]
    for line in lines:
        assert set(line) | {"model", "batch_size"} == set(bench.MODEL_COLUMNS)
        assert (line["above"], line["status"]) == (0, "optimal")
