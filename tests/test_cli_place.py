"""`lowtide place`: what it prints, writes and refuses, what does not fit, and that an interrupt leaves the best so far."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from typer.testing import CliRunner

import lowtide
from lowtide.cli import app
from lowtide.cli.place import search
from lowtide.placement.base import Placement
from lowtide.placement.greedy import Greedy
from lowtide.problems import Status
from lowtide.problems.files import load_buffers
from lowtide.problems.placement import PlaceProblem, check_placement
from tests.placements import buffers_to_csv, problems

EXAMPLE = Path(__file__).parent / "data" / "place" / "example.12.csv"
KEYS = [
    "status", "interrupted", "arena_bytes", "lower_bound_bytes", "capacity_bytes", "gap", "solver", "effort", "seconds", "offsets",
]  # fmt: skip


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["place", *map(str, arguments)], env={"COLUMNS": "120"})


def answer(*arguments: object, code: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--json", "-")
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert list(found) == KEYS
    return found


@pytest.fixture
def tight(tmp_path: Path) -> Path:
    """Ten buffers that need 13 bytes, although at most 12 are alive."""
    sizes = [5, 5, 2, 3, 1, 4, 1, 1, 4, 7]
    starts, ends = zip((0, 3), (2, 5), (3, 5), (0, 2), (2, 6), (4, 6), (2, 4), (0, 1), (1, 2), (5, 6), strict=True)
    path = tmp_path / "tight.csv"
    path.write_text(buffers_to_csv(PlaceProblem.of(sizes, starts, ends)))
    return path


def test_the_tables() -> None:
    result = run(EXAMPLE, "--solver", "greedy{order=start,fit=best}")
    assert result.exit_code == 0, result.output
    for words in (
        r"buffers +│ 5 ", r"arena +│ \d+ B ", r"lower bound +│ 12 B", r"gap +│ ", r"status +│ \w+: (Nothing takes|It is right)",
        r"solver +│ Greedy\(order='start', fit='best'\)", r"seconds +│ \d", r"nothing shared +│ +20 B │ +\d+\.\d%",
        r"first fit, as they start +│ +\d+ B │", r"first fit, by size +│ +\d+ B │",
    ):  # fmt: skip
        assert re.search(words, result.stdout), (words, result.stdout)


@given(problems(max_buffers=5))
@settings(max_examples=25)
def test_any_problem_is_printed_and_written(tmp_path_factory: pytest.TempPathFactory, problem: PlaceProblem) -> None:
    folder = tmp_path_factory.mktemp("case")
    (folder / "in.csv").write_text(buffers_to_csv(problem))
    result = run(folder / "in.csv", "--json", folder / "out.json", "--output", folder / "out.csv")
    assert result.exit_code == 0, result.output
    figures = json.loads((folder / "out.json").read_text())
    with (folder / "out.csv").open(encoding="utf-8", newline="") as written:
        offsets = [int(row["offset"]) for row in csv.DictReader(written)]
    assert dict(zip(problem.names, offsets, strict=True)) == figures["offsets"]
    check_placement(problem, offsets, figures["arena_bytes"])
    assert figures["arena_bytes"] == lowtide.place(folder / "in.csv").arena_bytes


def test_json_alone_on_standard_output() -> None:
    figures = answer(EXAMPLE)
    problem, found = load_buffers(EXAMPLE), lowtide.place(EXAMPLE)
    known = {
        "status": "optimal", "interrupted": False, "arena_bytes": 12, "lower_bound_bytes": 12, "capacity_bytes": None, "gap": 0.0,
        "solver": found.solver, "effort": dict(found.stats), "offsets": dict(zip(problem.names, found.offsets, strict=True)),
    }  # fmt: skip
    assert figures.items() >= known.items()
    assert figures["seconds"] >= 0


def test_offsets_alone_on_standard_output() -> None:
    result = run(EXAMPLE, "--output", "-", "--solver", "exact")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "id,lower,upper,size,offset"
    assert [line.rpartition(",")[0] for line in lines] == ["id,lower,upper,size", *EXAMPLE.read_text().split()[1:]]


def test_the_files_are_written_beside_the_table(tmp_path: Path) -> None:
    result = run(EXAMPLE, "--json", tmp_path / "a.json", "--output", tmp_path / "a.csv", "--plot", tmp_path / "a.png", "--capacity", 14)
    assert result.exit_code == 0, result.output
    assert re.search(r"capacity +│ 14 B", result.stdout)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "a.json", "a.png"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "a.json").read_text())["capacity_bytes"] == 14


def test_alignment_is_for_rows_without_their_own(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("id,lower,upper,size,alignment\na,0,2,4,\nb,0,2,4,8\nc,0,2,4,1\n")
    assert answer(tmp_path / "in.csv")["arena_bytes"] == 12
    figures = answer(tmp_path / "in.csv", "--align", 64)
    assert (figures["offsets"]["a"] % 64, figures["offsets"]["b"] % 8, figures["arena_bytes"]) == (0, 0, 12)
    (tmp_path / "in.csv").write_text("id,lower,upper,size\na,0,2,4\nb,0,2,4\n")
    assert answer(tmp_path / "in.csv", "--align", 64)["arena_bytes"] == 68


def test_what_cannot_fit_is_an_answer_with_its_proof(tight: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    for capacity, bound in ((12, 13), (11, 12)):
        result = run(tight, "--capacity", capacity, "--output", output)
        assert result.exit_code == 3, result.output
        proven = f"lowtide: does not fit in {capacity} bytes: proven: no arena is smaller than {bound} bytes\n"
        assert result.stderr == proven
        assert re.search(rf"infeasible: Nothing stays .*\n.*lower bound +│ {bound} B|lower bound +│ {bound} B", result.stdout)
        assert not output.exists()
    assert answer(tight, "--capacity", 12, code=3).items() >= {"status": "infeasible", "lower_bound_bytes": 13}.items()
    assert answer(tight, "--capacity", 13)["arena_bytes"] == 13


def test_what_may_or_may_not_fit_is_an_answer_too(tight: Path) -> None:
    result = run(tight, "--capacity", 12, "--solver", "greedy")
    assert result.exit_code == 3, result.output
    assert re.fullmatch(
        r"lowtide: not known to fit in 12 bytes: the smallest arena found has 1\d bytes, and none is proven impossible: .*\n", result.stderr
    )
    assert answer(tight, "--capacity", 12, "--solver", "greedy", code=3)["status"] == "unknown"


class Nothing:
    """A placer without an answer."""

    def place(self, problem: PlaceProblem, capacity_bytes: int | None = None) -> Placement:
        return Placement((), 12, 12, Status.UNKNOWN, "Nothing()")


def test_no_placement_at_all_is_printed(tight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.cli.place.parse_placer", lambda text: Nothing())
    result = run(tight, "--capacity", 12, "--solver", "nothing", "--plot", tmp_path / "out.png")
    assert result.exit_code == 3
    assert "no placement was found, and none is proven impossible" in result.stderr
    assert re.search(r"arena +│ none: no placement was found", result.stdout)
    assert (tmp_path / "out.png").exists()
    assert answer(tight, "--capacity", 12, "--solver", "nothing", code=3).items() >= {"offsets": {}, "gap": None}.items()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: expected the columns id,lower,upper,size"),
        (b"id,lower,upper,size\na,0,x,8\n", "line 2: expected upper to be an integer, got 'x'"),
        (b"id,lower,upper,size\na\x1b[31m,0,1,-8\n", r"line 2: expected an id of characters that can be printed, got 'a\\x1b"),
        (b"id,lower,upper,size\n\xff", "expected text in UTF-8"),
    ],
)
def test_a_malformed_file_is_one_line_and_exit_code_2(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "broken.csv").write_bytes(content)
    check_refused(run(tmp_path / "broken.csv"), rf"broken\.csv: .*{message}")


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    copy = tmp_path / "copy.csv"
    copy.write_bytes(EXAMPLE.read_bytes())
    check_refused(run(tmp_path / "missing.csv"), r"missing\.csv: No such file or directory")
    check_refused(run(tmp_path), "Is a directory")
    for option in ("--json", "--output", "--plot"):
        check_refused(run(copy, option, tmp_path), f"{option} .*: expected a file, got a folder")
        check_refused(run(copy, option, tmp_path / "no" / "out.png"), f"{option} .*: No such file or directory")
        check_refused(run(copy, option, copy), f"{option} .*: expected another file than the problem itself")
    check_refused(run(copy, "--json", tmp_path / "x", "--output", tmp_path / "x"), "--output .*: expected another file than that of --json")
    check_refused(run(copy, "--json", "-", "--output", "-"), "--output -: expected another file than that of --json")
    check_refused(run(copy, "--plot", tmp_path / "out.gif"), r"out\.gif: expected a picture's name that ends in \.png, \.svg, \.pdf")
    assert copy.read_bytes() == EXAMPLE.read_bytes()
    assert list(tmp_path.iterdir()) == [copy]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--solver", "fastest"], "solver: expected one of .*auto, .*; got 'fastest'"),
        (["--solver", "greedy{order=young}"], "solver greedy: order: expected one of size, .*, got 'young'"),
        (["--solver", "greedy", "--nodes", "5"], "solver Greedy: expected .* limited by max_nodes, got .* settings among order, fit"),
        (["--solver", "greedy", "--seconds", "5"], "solver Greedy: expected .* limited by max_seconds"),
        (["--seconds", "nan"], "expected max_seconds to be more than 0, got nan"),
    ],
)
def test_solvers_that_cannot_be_had(arguments: list[str], message: str) -> None:
    check_refused(run(EXAMPLE, *arguments), message)


def test_what_is_not_installed_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    check_refused(run(EXAMPLE, "--plot", "x.png"), r".*needs matplotlib, which is not installed: pip install 'lowtide\[plot\]'")
    assert list(tmp_path.iterdir()) == []


def check_refused(result: Any, message: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert len(lines[0]) < 2000
    assert re.match(f"lowtide: .*{message}", lines[0]), lines[0]


SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits it as ignored
from dataclasses import dataclass
from lowtide import cli
from lowtide.cli import solvers
from lowtide.placement.greedy import Greedy, Portfolio

@dataclass(frozen=True)
class Slow:
    "Improves once, then goes on for ever."
    answers_first: bool = True

    def answers(self, problem, capacity_bytes=None):
        if problem.names[0] == "b1":
            if self.answers_first:
                yield Greedy("start").place(problem, capacity_bytes)
                yield Portfolio().place(problem, capacity_bytes)
            print("searching", file=sys.stderr, flush=True)
            time.sleep(600)
        yield Greedy().place(problem, capacity_bytes)

    def place(self, problem, capacity_bytes=None):
        *_, last = self.answers(problem, capacity_bytes)
        return last

solvers.PLACERS["slow"] = Slow
cli.main()
"""


def interrupted(*arguments: object) -> tuple[int, str, str]:
    command = [sys.executable, "-c", SLOW, "place", *map(str, arguments)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert running.stderr is not None
        assert running.stderr.readline() == "searching\n"
        running.send_signal(signal.SIGINT)
        output, errors = running.communicate(timeout=60)
    finally:
        running.kill()
    return running.returncode, output, errors


def test_an_interrupt_prints_the_best_so_far() -> None:
    code, output, errors = interrupted(EXAMPLE, "--solver", "slow", "--json", "-")
    figures = json.loads(output)
    assert (code, errors) == (130, "lowtide: interrupted: this is the best placement so far\n")
    assert (figures["interrupted"], figures["arena_bytes"]) == (True, 12)
    check_placement(load_buffers(EXAMPLE), figures["offsets"].values(), 12)


def test_an_interrupt_before_the_first_answer_still_has_one(tmp_path: Path) -> None:
    code, output, _ = interrupted(EXAMPLE, "--solver", "slow{answers_first=false}", "--json", tmp_path / "out.json")
    assert code == 130
    assert re.search(r"status +│ interrupted; (feasible|optimal)", output)
    figures = json.loads((tmp_path / "out.json").read_text())
    simple = [Greedy(order).place(load_buffers(EXAMPLE)).arena_bytes for order in ("start", "size")]  # type: ignore[arg-type]
    assert figures["arena_bytes"] == min(simple)


def test_a_problem_without_buffers_or_bytes(tmp_path: Path) -> None:
    outcome = search(PlaceProblem.of([], [], []), Greedy())
    assert (outcome.gap, outcome.best.offsets, outcome.best.arena_bytes) == (0, (), 0)
    (tmp_path / "none.csv").write_text("id,lower,upper,size\n")
    result = run(tmp_path / "none.csv", "--plot", tmp_path / "none.svg")
    assert result.exit_code == 0, result.output
    assert re.search(r"arena +│ 0 B", result.stdout)


def test_help_names_the_solvers() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for word in ("--solver", "--nodes", "--seconds", "--capacity", "--align", "--json", "--output", "--plot", "greedy", "portfolio"):
        assert word in result.stdout
