"""`lowtide order`: what it prints, writes and refuses, and that an interrupt leaves the best so far."""

from __future__ import annotations

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
from bench.order_files import problem_to_json
from lowtide.cli import app
from lowtide.cli.order import search
from lowtide.cost.memory import simulate
from lowtide.problems import Status
from lowtide.problems.files import load_problem
from lowtide.problems.order import OrderProblem, Task
from lowtide.schedule import ProgramOrder, Schedule
from tests.problems import Case, cases

DATA = Path(__file__).parent / "data" / "order"
INSTANCE = DATA / "train-L15.json"
KEYS = [
    "status", "interrupted", "peak_bytes", "lower_bound_bytes", "gap", "solver", "states", "seconds", "simple_orders_bytes", "order",
    "names",
]  # fmt: skip


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["order", *map(str, arguments)], env={"COLUMNS": "120"})


def answer(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_table() -> None:
    result = run(INSTANCE, "--solver", "ready-list{oldest=waiting}")
    assert result.exit_code == 0, result.output
    for words in (
        r"nodes +│ 60 ", r"peak +│ 41\.96 MiB \(43,999,232 bytes\)", r"lower bound +│ .* MiB", r"gap +│ \d+\.\d\d%",
        r"status +│ feasible: It is right", r"solver +│ ReadyList\(oldest='waiting'\)", r"states +│ 0 ", r"seconds +│ \d",
        r"as written +│ 43\.58 MiB │ +3\.7%", r"from outputs +│ 43\.58 MiB", r"from inputs +│ 75\.45 MiB", r"ready list +│ ",
        r"at the peak, step \d+ of 60: \w+_\d+", r"Fwd_\d+ +│ +6,422,528 │ +\d+ │ +\d+ │",
    ):  # fmt: skip
        assert re.search(words, result.stdout), (words, result.stdout)


def order_of(figures: dict[str, Any], path: Path) -> list[int]:
    """The printed order, from places in the file to nodes."""
    items = json.loads(path.read_text())["nodes"]
    nodes = [place for place, item in enumerate(items) if item.get("op") != "Input"]
    return [nodes.index(place) for place in figures["order"]]


@given(cases(max_nodes=5))
@settings(max_examples=10)
def test_any_problem_is_printed_and_what_stands_at_the_peak_adds_up(tmp_path_factory: pytest.TempPathFactory, case: Case) -> None:
    path = tmp_path_factory.mktemp("case") / "problem.json"
    path.write_text(problem_to_json(case.problem))
    result = run(path)
    assert result.exit_code == 0, result.output
    figures = answer(path)
    footprint = simulate(case.problem, order_of(figures, path))
    assert footprint.peak_bytes == figures["peak_bytes"] == lowtide.order(path).peak_bytes
    _, titled, at_peak = result.stdout.partition("at the peak")
    assert bool(titled) == bool(case.tasks)
    if titled:
        assert sum(int(nbytes) for nbytes in re.findall(r"│ +([\d]+) │ +\d* │ +\d* │", at_peak)) == footprint.peak_bytes


def test_json_alone_on_standard_output() -> None:
    figures = answer(INSTANCE)
    assert list(figures) == KEYS
    found = lowtide.order(INSTANCE)
    known = {
        "status": found.status.name.lower(), "peak_bytes": found.peak_bytes, "lower_bound_bytes": found.lower_bound_bytes,
        "order": [node + 1 for node in found.order], "solver": found.solver, "interrupted": False,
    }  # fmt: skip
    assert figures.items() >= known.items()
    assert figures["gap"] == (found.peak_bytes - found.lower_bound_bytes) / found.peak_bytes
    assert figures["names"] == [load_problem(INSTANCE).names[node] for node in found.order]
    assert figures["simple_orders_bytes"]["as written"] == 45694976
    assert figures["seconds"] >= 0
    assert figures["states"] == found.stats.get("states", 0)


def test_json_to_a_file_and_the_table(tmp_path: Path) -> None:
    result = run(INSTANCE, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    assert "lower bound" in result.stdout
    assert list(json.loads((tmp_path / "out.json").read_text())) == KEYS
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_names_from_a_file_cannot_steer_the_terminal(tmp_path: Path) -> None:
    name = "[bold]é\ud800\x1b[31m\n" + "x" * 200
    (tmp_path / "odd.json").write_text(problem_to_json(OrderProblem.of([8], [Task(name, makes=(0,))])))
    result = run(tmp_path / "odd.json")
    assert result.exit_code == 0, result.output
    assert r"[bold]é\ud800\x1b[31m\nxx" in result.stdout
    assert "x" * 60 not in result.stdout
    assert answer(tmp_path / "odd.json")["names"] == [name]


def test_a_terminal_that_cannot_write_a_name(tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text(problem_to_json(OrderProblem.of([8], [Task("é", makes=(0,))])))
    finished = lowtide_order(tmp_path / "odd.json", PYTHONIOENCODING="ascii")
    output, errors = finished.communicate(timeout=120)
    assert (finished.returncode, errors) == (0, "")
    assert r"step 0 of 1: \xe9" in output


GENERAL = {
    "format": "lowtide.order", "version": 1,
    "tensors": [{"bytes": 8}, {"bytes": 8}],
    "nodes": [{"name": "a", "makes": [0]}, {"name": "b", "makes": [1], "reads": [0]}],
}  # fmt: skip


def general(**changes: object) -> str:
    return json.dumps(GENERAL | changes)


def second(**fields: object) -> str:
    """A problem whose second node is as given."""
    return general(nodes=[{"name": "a", "makes": [0]}, {"name": "b"} | fields])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected a whole JSON text"),
        (general()[:-9], "expected a whole JSON text"),
        (b"\xff\xfe{}", "expected text in UTF-8"),
        ("\ufeff{}", "BOM"),
        ('{"nodes": ' + "[" * 300_000, "expected a whole JSON text"),
        ('{"nodes": ' + "[" * 9_000 + "]" * 9_000 + "}", "expected a whole JSON text|node 0: expected an object, got list"),
        ("null", 'expected a JSON object with a list of "nodes"'),
        ("NaN", 'expected a JSON object with a list of "nodes"'),
        ('{"nodes": {}}', 'expected a JSON object with a list of "nodes"'),
        ('{"nodes": [NaN]}', "node 0: expected an object, got float"),
        ('{"nodes": [], "nodes": []}', "the top level: expected each field of an object once, got 'nodes' twice"),
        ('{"nodes": [{"op": "A", "bytes": 1, "bytes": 2}]}', "node 0: expected each field of an object once, got 'bytes' twice"),
        ('{"nodes": [{"op": "A", "bytes": -1}]}', r"tensor 0: bytes: expected 0 to 2\*\*62 bytes, got -1, made by node 0 \(A_0\)"),
        ('{"nodes": [{"op": "A", "bytes": 1e3}]}', r"node 0 \(A\): expected 'bytes' to be an integer, got float"),
        ('{"nodes": [{"op": "A", "bytes": NaN}]}', r"node 0 \(A\): expected 'bytes' to be an integer, got float"),
        ('{"nodes": [{"op": "A", "bytes": true}]}', r"node 0 \(A\): expected 'bytes' to be an integer, got bool"),
        ('{"nodes": [{"op": "A", "bytes": "8"}]}', r"node 0 \(A\): expected 'bytes' to be an integer, got str"),
        ('{"nodes": [{"op": "A", "bytes": 1, "inputs": [true]}]}', r"node 0 \(A\): expected 'inputs' to be a list of integers"),
        ('{"nodes": [{"op": "A", "bytes": 1, "inputs": [7]}]}', r"node 0 \(A\): expected inputs from 0 to 0, got 7"),
        ('{"nodes": [{"op": "A", "bytes": 1, "inputs": [0]}]}', r"cycle: node 0 \(A_0\) after node 0 \(A_0\)"),
        ('{"nodes": [{"op": "A\\n\\u001b", "bytes": -1}]}', r"made by node 0 \(A\\n\\x1b_0\)"),
        ('{"nodes": [{"op": "' + "A" * 50_000 + '", "bytes": 1, "inputs": [7]}]}', "node 0 .* expected inputs from 0 to 0, got 7"),
        (general(version=2), "'lowtide.order' version 2"),
        (general(version=True), "'lowtide.order' version True"),
        (general(tensors=None), "the top level: expected 'tensors' to be a list, got nothing"),
        (general(tensors=[{"bytes": 8}, {"bytes": 2**63}]), r"tensor 1: bytes: .* got 9223372036854775808, made by node 1 \(b\)"),
        (general(tensors=[{"bytes": 8}, {"bytes": 2**62}]), r"the sum of all tensors.* got 4611686018427387912"),
        (general().replace('"bytes": 8', '"bytes": 8' + "0" * 6000, 1), r"tensor 0: bytes: .*more than 30 digits, made by node 0 \(a\)"),
        (general(resident_bytes=-1), "resident_bytes: expected 0 to 2"),
        (second(reads=[2]), r"node 1 \(b\): reads: expected a tensor from 0 to 1, got 2"),
        (second(reads=[-1]), r"node 1 \(b\): reads: expected a tensor from 0 to 1, got -1"),
        (second(reads=[0, 0]), r"node 1 \(b\): reads: expected each tensor once, got tensor 0 twice"),
        (second(makes=[0]), r"node 1 \(b\): expected to make tensors that no other node makes, got tensor 0 of node 0 \(a\)"),
        (second(makes=[1], reads=[1]), r"in a cycle: node 1 \(b\) after node 1 \(b\)"),
        (second(makes=[1], after=[2]), r"node 1 \(b\): after: expected a node from 0 to 1, got 2"),
        (general(nodes=[{"name": "a", "after": [1]}, {"name": "b", "after": [0]}]), r"node 0 \(a\) after node 1 \(b\) after node 0 \(a\)"),
        (second(after=[0, 0]), r"node 1 \(b\): after: expected each node once, got node 0 twice"),
        (second(workspace_bytes=-4), r"node 1 \(b\): workspace_bytes: expected 0 to 2"),
        (second(workspace_bytes=4.5), r"node 1 \(b\): expected 'workspace_bytes' to be an integer, got float"),
        (second(makes=[1], takes=[[0, 0]]), r"node 1 \(b\): expected reuses of distinct tensors that it reads \[\], got \[0\]"),
        (second(reeds=[0]), "node 1: expected fields among .*, got 'reeds'"),
    ],
)  # fmt: skip
def test_a_malformed_file_is_one_line_and_exit_code_2(content: str | bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    check_refused(run(tmp_path / "broken.json"), rf"broken\.json: .*{message}")


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    copy.write_bytes(INSTANCE.read_bytes())
    check_refused(run(tmp_path / "missing.json"), r"missing\.json: No such file or directory")
    check_refused(run(tmp_path), "Is a directory")
    check_refused(run(copy, "--json", tmp_path), "expected a file, got a folder")
    check_refused(run(copy, "--json", tmp_path / "no" / "out.json"), "No such file or directory")
    check_refused(run(copy, "--json", copy), "expected another file than the problem itself")
    assert copy.read_bytes() == INSTANCE.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--solver", "fastest"], "solver: expected one of .*auto, .*; got 'fastest'"),
        (["--solver", "ready-list{oldest=young}"], "solver ready-list: oldest: expected one of index, waiting, got 'young'"),
        (["--solver", "program-order", "--states", "5"], "solver ProgramOrder: expected .* limited by max_states, got .* no settings"),
        (["--solver", "program-order", "--seconds", "5"], "solver ProgramOrder: expected .* limited by max_seconds"),
    ],
)  # fmt: skip
def test_solvers_that_cannot_be_had(arguments: list[str], message: str) -> None:
    check_refused(run(INSTANCE, *arguments), message)


def check_refused(result: Any, message: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert len(lines[0]) < 2000
    assert re.match(f"lowtide: .*(?:{message})", lines[0]), lines[0]


SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits it as ignored
from dataclasses import dataclass
from lowtide import cli
from lowtide.cli import order, solvers
from lowtide.schedule import ReadyList, ReversePostOrder

@dataclass(frozen=True)
class Slow:
    "Improves once, then goes on for ever."
    answers_first: bool = True

    def answers(self, problem):
        if self.answers_first and problem.node_count > 1:
            yield ReversePostOrder("inputs").solve(problem)
            yield ReadyList().solve(problem)
        if problem.node_count > 1:
            print("searching", file=sys.stderr, flush=True)
            time.sleep(600)
        yield ReadyList().solve(problem)

    def solve(self, problem):
        *_, last = self.answers(problem)
        return last

solvers.SOLVERS["slow"] = Slow
cli.main()
"""


def lowtide_order(*arguments: object, program: str = "from lowtide import cli; cli.main()", **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, "order", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment)


def interrupted(*arguments: object) -> tuple[int, str, str]:
    running = lowtide_order(*arguments, program=SLOW)
    try:
        assert running.stderr is not None
        assert running.stderr.readline() == "searching\n"
        running.send_signal(signal.SIGINT)
        output, errors = running.communicate(timeout=60)
    finally:
        running.kill()
    return running.returncode, output, errors


def test_an_interrupt_prints_the_best_so_far() -> None:
    code, output, errors = interrupted(INSTANCE, "--solver", "slow", "--json", "-")
    figures = json.loads(output)
    assert (code, errors) == (130, "lowtide: interrupted: this is the best order so far\n")
    assert (figures["interrupted"], figures["solver"]) == (True, "ReadyList()")
    assert simulate(load_problem(INSTANCE), order_of(figures, INSTANCE)).peak_bytes == figures["peak_bytes"]


def test_an_interrupt_before_the_first_answer_still_has_one(tmp_path: Path) -> None:
    code, output, _ = interrupted(INSTANCE, "--solver", "slow{answers_first=false}", "--json", tmp_path / "out.json")
    assert code == 130
    assert re.search(r"status +│ interrupted; feasible", output)
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["peak_bytes"] == min(figures["simple_orders_bytes"].values())
    assert sorted(figures["order"]) == list(range(1, 61))


class Impossible:
    """A solver whose answer is that there is none."""

    def solve(self, problem: OrderProblem) -> Schedule:
        return Schedule((), 50_000_000, 50_000_000, Status.INFEASIBLE, "Impossible()", {"states": 3})


def test_no_order_within_a_limit_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.cli.order.parse_solver", lambda text: Impossible())
    monkeypatch.setattr("lowtide.cli.order.warm_up", lambda solver: None)
    result = run(INSTANCE, "--solver", "impossible")
    assert result.exit_code == 0, result.output
    for words in ("peak +│ none: no order is low enough", r"infeasible: Nothing stays within", "lower bound +│ 47.68 MiB", "states +│ 3 "):
        assert re.search(words, result.stdout), result.stdout
    assert answer(INSTANCE, "--solver", "impossible").items() >= {"status": "infeasible", "order": [], "names": []}.items()


def test_a_problem_without_nodes_or_bytes() -> None:
    outcome = search(OrderProblem.of([], []), ProgramOrder())
    assert (outcome.gap, outcome.states, outcome.best.order) == (0, 0, ())


def test_help_names_the_solvers() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for word in ("--solver", "--states", "--seconds", "--json", "ready-list", "reverse-post-order"):
        assert word in result.stdout
