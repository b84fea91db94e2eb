"""`lowtide report`: what it writes and refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowtide.cli import app
from tests.planned import chain, plan_of


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    plan_of(chain(12), memory_bytes=9 * 4096).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_several_forms_at_once(saved: Path) -> None:
    out = [saved.with_name(name) for name in ("plan.html", "trace.json", "plan.pickle")]
    result = CliRunner().invoke(app, ["report", str(saved), *map(str, out)])
    assert (result.exit_code, result.output) == (0, "")
    assert all(each.stat().st_size > 1000 for each in out)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["plan.html", "plan.gif"], "plan.gif: expected a name that ends in .html"),
        (["plan.json"], "expected another file than the problem itself"),
        (["nowhere/plan.html"], "expected a file in a folder that exists"),
    ],
)
def test_what_cannot_be_written_is_told_before_anything_is(saved: Path, names: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["report", str(saved), *(str(saved.parent / name) for name in names)])
    assert result.exit_code == 2
    assert told in " ".join(result.output.split())
    assert [each.name for each in saved.parent.iterdir()] == ["plan.json"]


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    result = CliRunner().invoke(app, ["report", str(tmp_path / "plan.json"), str(tmp_path / "plan.html")])
    assert result.exit_code == 2
    assert "expected a JSON object with" in " ".join(result.output.split())


def test_torch_is_not_needed(saved: Path) -> None:
    arguments = ["report", str(saved), str(saved.with_name("plan.html"))]
    code = f"import sys; sys.modules['torch'] = None; from lowtide.cli import main; sys.argv[1:] = {arguments!r}; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
