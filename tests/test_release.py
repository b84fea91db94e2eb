"""A release is tagged when nothing is missing: each thing that can be missing is told."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

import pytest

import lowtide
from release import tag
from release.tag import dated, missing_in, version_of

CHANGELOG = "# Changelog\n\n## Unreleased\n\nNew lines are added above.\n\n## 0.1.0, to be released\n\n### Added\n\n- Steps.\n"


def git(root: Path, *command: str) -> str:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *identity, *command], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def commit(root: Path) -> str:
    git(root, "add", "-A")
    git(root, "commit", "-qm", "One more", "--allow-empty")
    return git(root, "rev-parse", "HEAD")


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """A checkout from which nothing is missing."""
    git(tmp_path, "init", "-q", "-b", "main")
    for folder in ("lowtide/base", "release"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "lowtide" / "base" / "__init__.py").write_text('VERSION = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "release" / "matrix.json").write_text("[]")
    (tmp_path / ".gitignore").write_text("dist\n")
    code = commit(tmp_path)
    cells = [{"python": "3.12.1", "torch": "2.14.1", "failed": [], "code": code}]
    (tmp_path / "release" / "matrix.json").write_text(json.dumps(cells))
    commit(tmp_path)
    return tmp_path


def test_nothing_is_missing(ready: Path):
    assert list(missing_in(ready)) == []


def test_all_that_is_missing_is_told(ready: Path):
    git(ready, "tag", "v0.1.0")
    git(ready, "switch", "-qc", "other")
    (ready / "lowtide" / "new.py").write_text("")
    commit(ready)
    (ready / "CHANGELOG.md").write_text(CHANGELOG.replace("added above.", "added above.\n\n- A line.").replace("0.1.0,", "0.0.9,"))
    words = ("clean checkout", "branch main", "there already", "expected the heading", "1 lines are under", "has changed since")
    told = list(missing_in(ready))
    assert len(told) == len(words)
    assert all(word in line for word, line in zip(words, told, strict=True))


def test_a_failure_of_the_matrix_is_told(ready: Path):
    cells = json.loads((ready / "release" / "matrix.json").read_text())
    (ready / "release" / "matrix.json").write_text(json.dumps([cells[0] | {"failed": ["tests.a::one: wrong"]}]))
    commit(ready)
    assert list(missing_in(ready)) == ["matrix: 1 tests failed on Python 3.12.1, torch 2.14.1: mend them, then python -m release.matrix"]


@pytest.mark.parametrize(("code", "words"), [("{}+", "has changed since"), ("0123abcd", "this clone lacks"), ("", "this clone lacks")])
def test_a_cell_of_another_or_a_changed_checkout_is_told(ready: Path, code: str, words: str):
    cells = json.loads((ready / "release" / "matrix.json").read_text())
    cells[0]["code"] = code.format(cells[0]["code"])
    (ready / "release" / "matrix.json").write_text(json.dumps(cells))
    commit(ready)
    (told,) = missing_in(ready)
    assert words in told


def release(root: Path, monkeypatch: pytest.MonkeyPatch, *options: str, **targets: str) -> None:
    """Run all of it on a checkout whose targets do this."""
    wheels = "mkdir dist && grep '^## 0' CHANGELOG.md > dist/lowtide-0.1.0.tar.gz"
    recipes = {"test": "true", "test-cuda": "true", "wheels": wheels} | {name.replace("_", "-"): line for name, line in targets.items()}
    (root / "Makefile").write_text("".join(f"{name}:\n\t@{recipe}\n" for name, recipe in recipes.items()))
    commit(root)
    git(root, "config", "user.name", "Someone")
    git(root, "config", "user.email", "someone@example.org")
    monkeypatch.setattr(tag, "_ROOT", root)
    monkeypatch.setattr(sys, "argv", ["tag", *options])
    tag.main()


def test_what_was_checked_and_built_is_tagged(ready: Path, monkeypatch: pytest.MonkeyPatch):
    (ready / "dist").mkdir()
    for name in ("lowtide-0.0.9.tar.gz", "lowtide-0.1.0-cp39-cp39-any.whl", "notes"):
        (ready / "dist" / name).write_text("older")
    release(ready, monkeypatch, test="grep '^## 0.1.0 - ' CHANGELOG.md", test_cuda="echo one passed")
    assert git(ready, "cat-file", "-t", "v0.1.0") == "tag"
    assert git(ready, "rev-parse", "v0.1.0^{commit}") == git(ready, "rev-parse", "main")
    assert git(ready, "log", "-1", "--format=%s, %an") == "lowtide 0.1.0, Someone"
    assert git(ready, "diff", "--name-only", "HEAD~") == "CHANGELOG.md"
    assert git(ready, "status", "--porcelain") == ""
    assert {each.name for each in (ready / "dist").iterdir()} == {"lowtide-0.1.0.tar.gz", "notes"}
    heading = (ready / "dist" / "lowtide-0.1.0.tar.gz").read_text()
    assert heading.startswith("## 0.1.0 - 2")
    assert heading in (ready / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("change", ["{} commit -qm Another --allow-empty", "{} switch -qc other", "touch {root}/new.py", "{} tag v0.1.0"])
def test_a_checkout_that_changed_meanwhile_is_left_alone(ready: Path, monkeypatch: pytest.MonkeyPatch, change: str):
    words = "git fetch .* ended with 1: .*v0.1.0 .*clobber" if "tag" in change else "the checkout has changed since the checks began"
    with pytest.raises(SystemExit, match=f"(?s){words}"):
        release(ready, monkeypatch, test=change.format(f"git -C {ready}", root=ready))
    assert git(ready, "log", "-1", "--format=%s") in ("One more", "Another")
    assert "to be released" in (ready / "CHANGELOG.md").read_text()
    assert not (ready / "dist").exists()


def test_a_check_that_fails_or_tests_nothing_ends_it(ready: Path, monkeypatch: pytest.MonkeyPatch):
    assert tag._NOTHING in (Path(__file__).parents[1] / "Makefile").read_text()
    with pytest.raises(SystemExit, match="make test ended with 2"):
        release(ready, monkeypatch, test="false")
    with pytest.raises(SystemExit, match="make test-cuda tested nothing, as told above: mend that, or say --without-cuda"):
        release(ready, monkeypatch, test_cuda=f"echo '{tag._NOTHING}'")
    assert git(ready, "tag") == ""
    release(ready, monkeypatch, "--without-cuda", test_cuda=f"echo '{tag._NOTHING}'")
    assert git(ready, "tag") == "v0.1.0"


def test_a_version_is_one_that_can_be_released(ready: Path):
    (ready / "lowtide" / "base" / "__init__.py").write_text('VERSION = "0.1.dev"\n')
    commit(ready)
    assert next(iter(missing_in(ready))).startswith("version: expected one such as 0.1.0 or 0.2.0rc1, got 0.1.dev")
    (ready / "lowtide" / "base" / "__init__.py").write_text("")
    with pytest.raises(ValueError, match="expected a line VERSION"):
        version_of(ready)


def test_this_checkout_has_a_version_and_every_missing_thing_can_be_told():
    root = Path(__file__).parents[1]
    assert version_of(root) == lowtide.__version__
    assert all(isinstance(each, str) for each in missing_in(root))


def test_the_heading_gets_the_day():
    assert "\n## 0.1.0 - 2026-12-01\n" in dated(CHANGELOG, "0.1.0", datetime.date(2026, 12, 1))
