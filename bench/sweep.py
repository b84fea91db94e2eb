"""A table of many subjects that runs of some of them update, row by row: what is cut off keeps what it has.

    sweep = Sweep("coverage", title, columns, subjects, notes)
    sweep.run(rows, save=True)      # rows: an iterator, each saved as it comes

Rows of subjects that a run does not try stay as they were saved; the notes are of all rows. Each row says of which code it is.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine import code
from bench.results import RESULTS, Results, load

Row = dict[str, Any]
_CHECKOUT = Path(__file__).parents[1]
_CODE = "code"  # the column that all sweeps have beside their own


@dataclass(frozen=True)
class Sweep:
    """What is tried, and where its rows go. The first column names the subject, which may have several rows."""

    name: str  # of the table's file
    title: str
    columns: tuple[str, ...]
    subjects: Sequence[str]  # all there are, in the table's order; rows of others are dropped
    notes: Callable[[list[Row]], tuple[str, ...]]
    directory: Path = RESULTS

    def run(self, rows: Iterable[Row], save: bool) -> Results:
        """Print each row as it comes and, where `save` is asked, put it into the saved table at once. The table of this run's rows."""
        found: list[Row] = []
        for row in rows:
            row = {key: portable(cell) for key, cell in row.items()} | {_CODE: code()}
            found.append(row)
            print(*(f"{key}={cell}" for key, cell in row.items() if cell not in (None, "", 0)), flush=True)
            if save:
                self.save(found)
        return self.table(found)

    def save(self, rows: Sequence[Row]) -> None:
        """Save the table with `rows` in the place of all that their subjects had. Several processes may do so at a time."""
        with _alone(self.directory):
            tried = {row[self.columns[0]] for row in rows}
            self.table([*(row for row in self.saved() if row[self.columns[0]] not in tried), *rows]).save(self.directory)

    def table(self, rows: Iterable[Row]) -> Results:
        """These rows in the order of the subjects."""
        place = {subject: at for at, subject in enumerate(self.subjects)}
        ordered = sorted((row for row in rows if row[self.columns[0]] in place), key=lambda row: place[row[self.columns[0]]])
        return Results(self.name, self.title, (*self.columns, _CODE), tuple(ordered), (*self.notes(ordered), self._origin(ordered)))

    def _origin(self, rows: Sequence[Row]) -> str:
        """How much of what there is has rows, and of which code they are."""
        counts = Counter(row.get(_CODE) or "a commit that was not noted" for row in rows)
        told = ", ".join(f"{count} of {commit}" for commit, count in counts.most_common())
        return f"{len({row[self.columns[0]] for row in rows})} of {len(self.subjects)} have rows; rows by the package's commit: {told}"

    def saved(self) -> list[Row]:
        """The rows of the saved table; none where there is no table, or one with other columns. Older ones have no commit."""
        try:
            table = load(self.name, self.directory)
        except FileNotFoundError:
            return []
        return [dict(row) for row in table.rows] if table.columns in (self.columns, (*self.columns, _CODE)) else []

    def selected(self, options: argparse.Namespace, chosen: Callable[[str], bool]) -> list[str]:
        """The subjects that a command line asks for. Exits where there are none."""
        done = {row[self.columns[0]] for row in self.saved()} if options.missing else set()
        names = [name for name in self.subjects if chosen(name) and name not in done]
        if not names:
            raise SystemExit(f"{self.name}: no {self.columns[0]} of {len(self.subjects)} is asked for that is not in the table already")
        return names


def add_options(parser: argparse.ArgumentParser, limit_seconds: float) -> None:
    """What the command lines of all sweeps take beside their selection."""
    parser.add_argument("--missing", action="store_true", help="only subjects that the saved table has no row of")
    parser.add_argument("--limit-seconds", type=float, default=limit_seconds, help="of one subject")
    parser.add_argument("--no-save", action="store_true", help="only print")


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One process at a time reads and replaces tables in this directory."""
    directory.mkdir(parents=True, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def portable(cell: Any) -> Any:
    """A cell without the folders of this machine: files are named from the package or the checkout on."""
    if not isinstance(cell, str):
        return cell
    return re.sub(rf"(?:{re.escape(str(_CHECKOUT))}/)?(?:[^\s'\"]*/site-packages/)?", "", cell)
