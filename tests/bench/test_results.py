import json
import platform
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bench.machine import code, machine
from bench.results import Results, load

TABLE = Results(
    "table",
    "A table",
    ("model", "peak_bytes", "step_us", "saving", "operators"),
    (
        {"model": "alexnet", "peak_bytes": 3 * 2**20, "step_us": 1500.0, "saving": 0.25, "operators": 1200},
        {"model": "gpt-neo", "operators": 5200},
    ),
    ("planned, not run: -",),
)


def test_a_table_comes_back_as_it_was(tmp_path: Path):
    path = TABLE.save(tmp_path / "new")
    again = load("table", tmp_path / "new")
    assert again.rows[0] == {**TABLE.rows[0], "code": code()}
    assert again.rows[1] == {"model": "gpt-neo", "peak_bytes": None, "step_us": None, "saving": None, "operators": 5200, "code": code()}
    assert (again.name, again.title, again.columns, again.notes) == (TABLE.name, TABLE.title, TABLE.columns, TABLE.notes)
    assert list(path.parent.iterdir()) == [path]


def test_a_table_prints_with_units():
    console = Console(record=True, width=100)
    TABLE.print(console)
    text = console.export_text()
    assert "3.0 MiB" in text
    assert "1.50 ms" in text
    assert "0.250" in text
    assert "1,200" in text
    assert "planned, not run" in text


def test_a_strange_column_is_refused():
    with pytest.raises(ValueError, match=r"row 0 of t: expected columns a; got also b"):
        Results("t", "T", ("a",), ({"a": 1, "b": 2},))


def test_what_is_not_a_number_is_not_saved(tmp_path: Path):
    with pytest.raises(ValueError, match="JSON compliant"):
        Results("t", "T", ("a",), ({"a": float("nan")},)).save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_machine_is_described_without_naming_it():
    found = machine()
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert isinstance(found["memory_bytes"], int)
    text = json.dumps(found)
    assert platform.node() not in text
    assert str(Path.home()) not in text
