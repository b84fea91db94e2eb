"""A result table: kept as JSON under `bench/results/`, printed for people."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.machine import code, machine

Cell = str | int | float | None  # None: not measured here
_WIDTH = 240  # where the output is no terminal: tables should not be squeezed into a log
FOLDER_VARIABLE = "LOWTIDE_BENCH_RESULTS"  # of the environment: `bench.rerun` has tables saved elsewhere until all of them are there
RESULTS = Path(os.environ.get(FOLDER_VARIABLE) or Path(__file__).parent / "results")
CODE = "code"  # what each row of a saved table has beside the table's columns: of which commit it is


@dataclass(frozen=True)
class Results:
    """Rows of one experiment. Each row has some of the columns; a unit stands in the column's name ("peak_bytes", "step_us")."""

    name: str  # of the file: "order_only"
    title: str
    columns: tuple[str, ...]
    rows: tuple[Mapping[str, Cell], ...]
    notes: tuple[str, ...] = ()  # how it was measured, what differs from elsewhere

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if strange := [column for column in row if column not in (*self.columns, CODE)]:
                raise ValueError(f"row {number} of {self.name}: expected columns {', '.join(self.columns)}; got also {', '.join(strange)}")

    def save(self, directory: Path = RESULTS) -> Path:
        """Write the table with its machine and the commit of its code to `directory`; the old file is replaced as a whole or not at all."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.name}.json"
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(self._document(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(part, path)
        return path

    def print(self, console: Console | None = None) -> None:
        """Show the table."""
        table = Table(*self.columns, title=self.title, caption="\n".join(self.notes) or None)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in self.rows:
            table.add_row(*(_shown(column, row.get(column)) for column in self.columns))
        (console or Console(width=None if sys.stdout.isatty() else _WIDTH)).print(table)

    def _document(self) -> dict[str, object]:
        made_by = {"machine": machine(), "code": code()}
        rows = [{column: row.get(column) for column in self.columns} | {CODE: row.get(CODE, made_by["code"])} for row in self.rows]
        return {"title": self.title, **made_by, "notes": list(self.notes), "columns": list(self.columns), "rows": rows}


def load(name: str, directory: Path = RESULTS) -> Results:
    """A table that was saved; each row says of which commit it is (None: not noted), and goes on to say so if it is saved again."""
    document = json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
    columns: Sequence[str] = document["columns"]
    of = {} if CODE in columns else {CODE: document.get("code")}
    rows = tuple({**of, **row} for row in document["rows"])
    return Results(name, document["title"], tuple(columns), rows, tuple(document["notes"]))


def with_kept(name: str, rows: Sequence[Mapping[str, Cell]], keys: Sequence[str]) -> tuple[Mapping[str, Cell], ...]:
    """These rows, behind those of the saved table that have other keys: for a table that is measured in several runs."""
    now = {tuple(row.get(key) for key in keys) for row in rows}
    saved = load(name).rows if (RESULTS / f"{name}.json").exists() else ()
    return (*(row for row in saved if tuple(row.get(key) for key in keys) not in now), *rows)


def _shown(column: str, cell: Cell) -> str:
    """A cell for people: bytes in MiB, microseconds in ms, other fractions to three places."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if column.endswith("_bytes"):
        return f"{cell / 2**20:,.1f} MiB"
    if column.endswith("_us"):
        return f"{cell / 1e3:,.2f} ms"
    return f"{cell:.3f}" if isinstance(cell, float) else f"{cell:,}"
