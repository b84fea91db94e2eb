"""Tables that runs over some of their subjects update."""

import argparse
from pathlib import Path

import pytest

import bench.sweep
from bench.results import Results, load
from bench.sweep import Sweep, portable
from bench.torch_db.workers import answers


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    monkeypatch.setattr("bench.sweep.code", lambda: "0123abc")
    return Sweep("table", "A table", ("name", "mode", "right"), ("a", "b", "c"), lambda rows: (f"{len(rows)} rows",), tmp_path)


def test_that_rows_of_others_stay_and_notes_are_of_all(sweep: Sweep):
    sweep.run([{"name": "c", "right": 1}, {"name": "a", "mode": "one", "right": 1}, {"name": "a", "mode": "two", "right": 1}], save=True)
    printed = sweep.run([{"name": "b", "right": 2}, {"name": "a", "mode": "one", "right": 3}], save=True)
    saved = load("table", sweep.directory)
    assert [(row["name"], row["mode"], row["right"]) for row in saved.rows] == [("a", "one", 3), ("b", None, 2), ("c", None, 1)]
    assert saved.notes == ("3 rows", "3 of 3 have rows; rows by the package's commit: 3 of 0123abc")
    assert [row["name"] for row in printed.rows] == ["a", "b"]


def test_that_a_run_that_is_cut_off_keeps_its_rows(sweep: Sweep):
    def rows():
        yield {"name": "a", "right": 1}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep.run(rows(), save=True)
    assert [row["name"] for row in sweep.saved()] == ["a"]
    assert sweep.selected(argparse.Namespace(missing=True), lambda name: name != "c") == ["b"]
    with pytest.raises(SystemExit, match="no name of 3 is asked for"):
        sweep.selected(argparse.Namespace(missing=True), lambda name: name == "a")


def test_that_nothing_is_saved_where_that_is_not_asked(sweep: Sweep):
    sweep.run([{"name": "a", "right": 1}], save=False)
    assert list(sweep.directory.iterdir()) == []


def test_that_each_row_says_of_which_code_it_is(sweep: Sweep):
    Results(sweep.name, sweep.title, sweep.columns, ({"name": "a", "right": 1, "code": None},)).save(
        sweep.directory
    )  # as tables were before
    sweep.run([{"name": "c", "right": 1}], save=True)
    saved = load(sweep.name, sweep.directory)
    assert [(row["name"], row["code"]) for row in saved.rows] == [("a", None), ("c", "0123abc")]
    assert saved.notes[-1] == "2 of 3 have rows; rows by the package's commit: 1 of a commit that was not noted, 1 of 0123abc"


def test_that_a_worker_that_dies_is_told_and_the_next_name_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mortal.py").write_text(
        "import os, sys\n"
        "from bench.torch_db.workers import told\n"
        "for name in sys.argv[2:]:\n"
        "    told({'name': name, 'right': 1})\n"
        "    os._exit(1) if name == 'b' else told({'done': name})\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    rows = list(answers(["mortal"], ["a", "b", "c"], 3, 60.0, {"dead": 1}))
    assert [(row["name"], "dead" in row) for row in rows] == [("a", False), ("b", False), ("b", True), ("c", False)]


def test_cells_name_no_folder_of_this_machine():
    checkout = Path(bench.sweep.__file__).parents[1]
    told = f"refused at {checkout}/.venv/lib/python3.11/site-packages/transformers/models/a.py:12, called at {checkout}/bench/sweep.py:30"
    assert portable(told) == "refused at transformers/models/a.py:12, called at bench/sweep.py:30"
    assert portable("elsewhere '/usr/lib/site-packages/timm/b.py'") == "elsewhere 'timm/b.py'"
    assert portable(3) == 3
