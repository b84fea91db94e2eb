"""All saved tables anew: the list of benches is whole, and what is done is told from what is not."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest

import bench
from bench import rerun
from bench.machine import code, machine
from bench.rerun import BENCHES, ELSEWHERE, Bench, is_of, put_in_place
from bench.results import RESULTS, Results, load
from bench.tables import page

FOLDER = Path(bench.__file__).parent
PICTURES_ALONE = {"magis_frontiers"}  # what bench.magis draws


def _scripts() -> set[str]:
    """Modules that can be run and make a table."""
    found = set()
    for path in FOLDER.rglob("*.py"):
        name = ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts).removesuffix(".__main__")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        runs = any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body)
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bench.")]
        if runs and {each.name for node in imports for each in node.names} & {"Results", "Sweep", "Database"}:
            found.add(name)
    return found


def test_every_bench_that_saves_a_table_is_in_the_list():
    named = {each.module for each in BENCHES} | {word for how in ELSEWHERE.values() for word in how.split() if word.startswith("bench.")}
    scripts = _scripts()
    assert len(scripts) > 40
    assert scripts - named - {"bench.on_gpu"} == set(), "bench/rerun.py"


def test_every_saved_table_has_a_bench():
    tables = [table for each in BENCHES for table in each.tables]
    assert len(tables) == len(set(tables))
    saved = {path.stem for path in RESULTS.glob("*.json")}
    assert saved - PICTURES_ALONE - set(tables) - set(ELSEWHERE) == set()
    assert set(ELSEWHERE) <= saved


def test_every_module_of_the_list_is_there():
    for each in BENCHES:
        path = FOLDER.parent / each.module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), each.command


@pytest.mark.parametrize("each", BENCHES, ids=lambda each: each.tables[0])
def test_a_bench_knows_the_options_that_it_is_given(each: Bench):
    path = FOLDER.parent / each.module.replace(".", "/")
    source = (path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__main__.py").read_text(encoding="utf-8")
    if "Database" in source or "add_options" in source:
        source += "".join((FOLDER / name).read_text(encoding="utf-8") for name in ("sweep.py", "torch_db/database.py"))
    for option in re.findall(r"--[\w-]+", each.command):
        assert f'"{option}"' in source


def test_the_page_names_commands_that_are_in_the_list():
    named = {each.module for each in BENCHES} | {
        "bench.edge",
        "bench.on_gpu",
        "bench.on_gpu.survival",
        "bench.tables",
        "bench.device_calls",
    }
    assert set(re.findall(r"python -m (bench[\w.]*\w)", page())) <= named


def test_a_table_is_done_where_commit_and_machine_are_the_same():
    document = {"machine": machine(), "code": "abc", "rows": [{"code": "abc"}, {}]}
    assert is_of(document, "abc", machine() | {"threads": 7})
    assert not is_of(document, "def", machine())
    assert not is_of(document | {"rows": [{"code": "def"}]}, "abc", machine())
    assert not is_of(document | {"rows": [{"code": None}]}, "abc", machine())
    assert not is_of(document, "abc", machine() | {"torch": "2.99"})


def test_rows_that_a_later_save_keeps_are_of_their_own_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("bench.results.code", lambda: "first")
    Results("t", "T", ("a",), ({"a": 1},)).save(tmp_path)
    monkeypatch.setattr("bench.results.code", lambda: "second")
    Results("t", "T", ("a",), (*load("t", tmp_path).rows, {"a": 2})).save(tmp_path)
    document = json.loads((tmp_path / "t.json").read_text())
    assert document["code"] == "second"
    assert document["rows"] == [{"a": 1, "code": "first"}, {"a": 2, "code": "second"}]


def _bench(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, most_minutes: float = 1.0) -> Bench:
    """A bench of this test's own, whose tables go to `folder`."""
    (folder / "own_bench.py").write_text(text)
    monkeypatch.setattr(rerun, "_STAGED", folder / "staged")
    monkeypatch.setattr(rerun, "RESULTS", folder / "results")
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{FOLDER.parent}")
    (folder / "results").mkdir()
    return Bench("own_bench", ("own",), most_minutes)


_SAVES = """
from bench.results import Results, with_kept
Results("own", "T", ("a",), with_kept("own", ({"a": 1},), ("a",))).save()
"""


def test_a_bench_that_ends_well_replaces_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    each = _bench(tmp_path, monkeypatch, _SAVES)
    assert not rerun._is_done(each, code())
    assert rerun._run(each, code())
    assert rerun._is_done(each, code())
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["own.json"]


@pytest.mark.parametrize("end", ["import sys; sys.exit(3)", "1 / 0"])
def test_one_that_fails_leaves_the_old_table(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    each = _bench(tmp_path, monkeypatch, _SAVES + end)
    old = tmp_path / "results" / "own.json"
    old.write_text("old")
    assert not rerun._run(each, code())
    assert old.read_text() == "old"
    assert "ended with" in capsys.readouterr().out


def test_one_that_saves_nothing_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert not rerun._run(_bench(tmp_path, monkeypatch, ""), code())
    assert "own" in capsys.readouterr().out


def test_pictures_and_folders_come_along_and_logs_do_not(tmp_path: Path):
    staged, results = tmp_path / "staged", tmp_path / "results"
    (staged / "figures").mkdir(parents=True)
    for name in ("own.json", "figures/one.png", "log.txt", "own.1.part"):
        (staged / name).write_text(name)
    put_in_place(staged, results)
    assert sorted(str(path.relative_to(results)) for path in results.rglob("*") if path.is_file()) == ["figures/one.png", "own.json"]


def test_with_changes_that_are_not_committed_nothing_is_begun(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rerun, "code", lambda: "abc+")
    monkeypatch.setattr(sys, "argv", ["rerun"])
    with pytest.raises(SystemExit, match="commit first"):
        rerun.main()
