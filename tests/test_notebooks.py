"""The notebooks of the documentation run, show what their files hold, and become pages of the site."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from release.notebooks import FOLDER, page, ran, text

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SHOWS = {"stream", "text/plain", "text/html", "image/svg+xml"}


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _kinds(notebook: dict[str, Any]) -> list[list[list[str]]]:
    """By cell, in which forms it shows what."""
    outputs = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [[sorted(output.get("data", {"stream": 0})) for output in cell] for cell in outputs]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_its_file_holds(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    kept = _read(path)
    assert _kinds(ran(kept, path.name)) == _kinds(kept), f"python -m release.notebooks {path}"
    assert list(tmp_path.iterdir()) == []


def test_there_are_four_and_each_shows_a_picture():
    assert {path.stem for path in NOTEBOOKS} == {"first_step", "why_it_does_not_fit", "limits", "inference"}
    for path in NOTEBOOKS:
        assert "<svg" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_file_is_what_jupyter_reads(path: Path):
    notebook = _read(path)
    assert text(notebook) == path.read_text(encoding="utf-8")
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    counts = [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert {form for cell in _kinds(notebook) for output in cell for form in output} <= SHOWS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_page_has_the_code_the_text_and_the_pictures(path: Path):
    notebook = _read(path)
    shown = page(notebook, path.name)
    assert shown.startswith("# ")
    assert f"]({path.name})" in shown
    assert shown.count("```python\n") == sum(cell["cell_type"] == "code" for cell in notebook["cells"])
    assert shown.count("<svg xmlns") >= 1
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", shown)
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_a_cell_shows_what_it_prints_and_its_last_expression():
    sources = (["x = 2\n", "print(x)\n", "x + 1"], ["x"])
    first, second = ran({"cells": [{"cell_type": "code", "source": source} for source in sources]}, "n")["cells"]
    assert [output["output_type"] for output in first["outputs"]] == ["stream", "execute_result"]
    assert first["outputs"][0]["text"] == ["2\n"]
    assert first["outputs"][1]["data"] == {"text/plain": ["3"]}
    assert second["outputs"][0]["data"] == {"text/plain": ["2"]}


def test_what_a_cell_raises_is_told_with_its_number():
    with pytest.raises(ZeroDivisionError) as raised:
        ran({"cells": [{"cell_type": "code", "id": "a", "source": ["1 / 0"]}]}, "sums.ipynb")
    assert "sums.ipynb, cell 1" in str(raised.traceback[-1].path)
