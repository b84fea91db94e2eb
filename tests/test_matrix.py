"""The matrix of versions: how answers are read and told; that what was tried is what the metadata promises."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from release import matrix
from release.matrix import CELLS, PAGE, TESTS, Answer, answers, counts, page, row, save

ROOT = Path(__file__).parents[1]
XML = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.a" name="one"/><testcase classname="tests.a" name="two"><skipped message="no GPU"/></testcase>
<testcase classname="tests.b" name="three"><failure message="AssertionError: 1 == 2&#10;more">all</failure></testcase>
<testcase classname="" name="tests.c"><error message="collection failure">all</error></testcase>
</testsuite></testsuites>"""


def test_passed_skipped_and_failed_are_counted():
    assert counts(XML) == (1, 1, ("tests.b::three: AssertionError: 1 == 2", "::tests.c: collection failure"))


def test_an_answer_takes_the_place_of_an_older_one_of_the_same_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(matrix, "ANSWERS", tmp_path / "matrix.json")
    monkeypatch.setattr(matrix, "PAGE", tmp_path / "versions.md")
    save(Answer("3.12.1", "2.14.1", "5.23.0", failed=("tests.a::one: wrong",)))
    save(Answer("3.9.9", "2.9.0", "5.23.0", passed=3))
    save(Answer("3.12.1", "2.14.1+cpu", "5.23.0", passed=7))
    assert [(each.python, each.torch, each.passed, each.failed) for each in answers()] == [
        ("3.9.9", "2.9.0", 3, ()),
        ("3.12.1", "2.14.1+cpu", 7, ()),
    ]
    assert (tmp_path / "versions.md").read_text() == page(answers())


def test_tests_that_end_early_are_a_failure_of_their_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(matrix, "environment", lambda python, home, *packages: "the Python of the cell")
    monkeypatch.setattr(matrix, "_output", lambda command: "{}")
    monkeypatch.setattr(
        matrix.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, int(command[2] == "pytest"), "", "")
    )
    answer = matrix._tried(Answer("3.12.1", "2.14.1", "5.23.0"), "python3.12", tmp_path, tmp_path / "home")
    assert answer.failed == ("pytest ended with 1 before its end",)


def test_a_failure_is_told_below_the_table():
    answer = Answer("3.13.0", "2.15.0", "5.24.0", passed=2, failed=("tests.a::one: wrong",))
    assert row(answer).split("|")[5:8] == [" 2 ", " 0 ", " 1 "]
    assert "- 3.13.0, torch 2.15.0: tests.a::one: wrong" in page([answer])


def test_the_page_is_that_of_the_answers():
    assert PAGE.read_text(encoding="utf-8") == page(answers()), "python -m release.matrix"


def test_the_cells_have_the_ends_of_what_the_metadata_promises():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    first, after = re.search(r'requires-python = ">=(3\.\d+),<(3\.\d+)"', text).groups()
    pythons = {cell.partition(":")[0].removeprefix("python") for cell in CELLS}
    assert pythons == {f"3.{minor}" for minor in range(int(first[2:]), int(after[2:]))}
    oldest = re.search(r'"torch>=([\d.]+)"', text)[1]
    assert oldest in {cell.split(":")[1].rpartition(".")[0] for cell in CELLS}


def test_the_tests_of_a_cell_are_there():
    assert [name for name in TESTS if not (ROOT / name).exists()] == []


def test_the_nightly_run_has_the_same_cells():
    text = (ROOT / ".github/workflows/nightly.yml").read_text(encoding="utf-8")
    assert tuple(f"python{cell}" for cell in re.findall(r'- "(3\.\d+:[\d.:]+)"', text)) == CELLS
