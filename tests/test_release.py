"""A release is tagged when nothing is missing: each thing that can be missing is told."""

from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path

import pytest

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
    (tmp_path / "lowtide" / "base" / "release.py").write_text('VERSION = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "release" / "matrix.json").write_text("[]")
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


def test_a_version_is_one_that_can_be_released(ready: Path):
    (ready / "lowtide" / "base" / "release.py").write_text('VERSION = "0.1.dev"\n')
    commit(ready)
    assert next(iter(missing_in(ready))).startswith("version: expected one such as 0.1.0 or 0.2.0rc1, got 0.1.dev")
    (ready / "lowtide" / "base" / "release.py").write_text("")
    with pytest.raises(ValueError, match="expected a line VERSION"):
        version_of(ready)


def test_the_heading_gets_the_day():
    assert "\n## 0.1.0 - 2026-12-01\n" in dated(CHANGELOG, "0.1.0", datetime.date(2026, 12, 1))
