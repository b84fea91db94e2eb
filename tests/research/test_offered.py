"""The papers' solvers on the command line: found by their entry points where they are installed, and missed in plain words where not."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lowtide.cli import app, solvers
from lowtide.errors import FormatError
from lowtide.placement.base import Placer, limited
from lowtide.schedule.base import Solver
from research.addresses.cp_sat import Rectangles
from research.addresses.ilp import Addresses
from research.solvers import OFFERED_PLACERS, OFFERED_SOLVERS, PLACERS, SOLVERS, parse_placer, parse_solver

ROOT = Path(__file__).parents[2]
GRAPH = ROOT / "tests" / "data" / "order" / "train-L15.json"
BUFFERS = ROOT / "tests" / "data" / "place" / "example.12.csv"
OFFERED = {"lowtide.solvers": OFFERED_SOLVERS, "lowtide.placers": OFFERED_PLACERS}


def offer(monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    """Installed are packages that offer these solvers, and no others."""
    monkeypatch.setattr(
        solvers, "entry_points", lambda group: [EntryPoint(name.replace("_", "-"), value, group) for name, value in points.items()]
    )


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})


@pytest.mark.parametrize("group", OFFERED)
def test_the_package_offers_what_research_has(group: str) -> None:
    toml = pytest.importorskip("tomllib")  # not in Python 3.10
    declared = toml.loads((ROOT / "research" / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"][group]
    assert {name: EntryPoint(name, value, group).load() for name, value in declared.items()} == dict(OFFERED[group])


def test_the_package_has_all_folders() -> None:
    toml = pytest.importorskip("tomllib")
    packages = toml.loads((ROOT / "research" / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in (ROOT / "research").rglob("__init__.py")}
    assert set(packages) == folders


def test_an_installed_package_is_found_by_its_metadata(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / "someones_solvers-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someones-solvers\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[lowtide.solvers]\nin-levels = research.orders.dynamic:DynamicProgramme\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = run("order", GRAPH, "--solver", "in-levels")
    assert result.exit_code == 0, result.output
    assert "DynamicProgramme()" in result.stdout


def test_what_is_offered_can_be_used_within_what_is_lowtides_own(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, at_waists="research.orders.partition:AtWaists")
    assert solvers.parse_solver("best{solvers=[at-waists{inner=beam}]}") == parse_solver("best{solvers=[at-waists{inner=beam}]}")


def test_a_name_of_lowtides_own_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, auto="research.orders.dynamic:DynamicProgramme")
    assert type(solvers.parse_solver("auto")) is solvers.SOLVERS["auto"]


@pytest.mark.parametrize(("command", "solver"), [(("order", GRAPH), "intervals"), (("place", BUFFERS), "rectangles")])
def test_without_it_the_command_line_says_so(command: tuple[object, ...], solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch)
    result = run(*command, "--solver", solver)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert f"got '{solver}' (the papers' own methods come with lowtide-research, which is not installed: pip install" in result.stderr
    assert run(*command, "--solver", "auto").exit_code == 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_package:Solver", "offers no_such_package:Solver, which cannot be loaded: No module named"),
        ("research.solvers:Nothing", "offers research.solvers:Nothing, which cannot be loaded: .*has no attribute 'Nothing'"),
        ("research.solvers:parse_solver", "expected a class with a method solve at research.solvers:parse_solver, got <function"),
        ("research.addresses.ilp:Addresses", "expected a class with a method solve"),
    ],
)
def test_an_offer_that_is_none(value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, broken=value)
    with pytest.raises(FormatError, match=f"solver broken: .*{message}"):
        solvers.parse_solver("broken")
    assert type(solvers.parse_solver("auto")) is solvers.SOLVERS["auto"]  # who names another does not meet it


@pytest.mark.parametrize(("command", "solver"), [(("order", GRAPH), "intervals"), (("place", BUFFERS), "rectangles")])
def test_without_ortools_the_command_line_says_so(command: tuple[object, ...], solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools", None)
    offered: Any = {**OFFERED_SOLVERS, **OFFERED_PLACERS}[solver]
    offer(monkeypatch, **{solver: f"{offered.__module__}:{offered.__name__}"})
    result = run(*command, "--solver", solver)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "needs ortools, which is not installed: pip install ortools" in result.stderr


@pytest.mark.parametrize("name", OFFERED_SOLVERS)
def test_every_solver_can_be_named_and_its_settings_given_as_text(name: str) -> None:
    """The annotations of a solver's settings can be resolved: text that fits none of them is refused, not a NameError."""
    assert isinstance(parse_solver(name), SOLVERS[name])
    with pytest.raises(FormatError, match=f"solver {name}: expected (no )?settings"):
        parse_solver(f"{name}{{no_such_setting=1}}")


@pytest.mark.parametrize("name", OFFERED_PLACERS)
def test_every_placer_can_be_named_and_its_settings_given_as_text(name: str) -> None:
    assert isinstance(parse_placer(name), PLACERS[name])
    with pytest.raises(FormatError, match=f"solver {name}: expected settings"):
        parse_placer(f"{name}{{no_such_setting=1}}")


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("rectangles{workers=2}", Rectangles(workers=2)),
        ("addresses{solver=cp-sat}", Addresses("cp-sat")),
        ("at-waists{inner=best{solvers=[ready-list]}}", None),
    ],
)
def test_what_is_read(text: str, made: Placer | Solver | None) -> None:
    assert (parse_placer(text) == made) if made is not None else isinstance(parse_solver(text), SOLVERS["at-waists"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("addresses{solver=gurobi}", "solver: expected one of highs, scip, cp-sat, got 'gurobi'"),
        ("rectangles{workers=0}", "solver rectangles: expected max_effort, max_seconds and workers above 0"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_placer(text)


def test_limits_that_a_placer_cannot_have() -> None:
    with pytest.raises(FormatError, match="Rectangles: expected a solver that can be limited by max_nodes"):
        limited(Rectangles(), max_nodes=5)
