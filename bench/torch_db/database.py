"""The command line of a sweep over one of torch's own test databases: workers try its entries, their rows go into a table."""

from __future__ import annotations

import argparse
import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from bench.sweep import Row, Sweep, add_options
from bench.torch_db.workers import answers, told


@dataclass(frozen=True)
class Database:
    """One database: where its entries are, and how one is tried."""

    program: str  # "bench.op_db": what workers run
    source: str  # module of `torch.testing._internal`
    columns: tuple[str, ...]  # the first names the entry
    entries: Callable[[ModuleType], Iterable[Any]]
    name_of: Callable[[Any], str]
    rows: Callable[[Any, str, int], Iterable[Row]]  # of an entry, a dtype, and how many samples (0 for all)
    dead: Row  # what the row of an entry says whose process ended
    summary: Callable[[list[Row]], tuple[str, ...]]
    batch: int  # entries to a process
    limit_seconds: float  # of one entry


def precision(dtype: str) -> tuple[torch.dtype, bool]:
    """A dtype by its name, and whether autocast to bfloat16 is on: "autocast" is float32 under it."""
    return (torch.float32, True) if dtype == "autocast" else (getattr(torch, dtype), False)


def main(database: Database, description: str | None) -> None:
    """Try what the command line asks for, in workers; or be one of them."""
    options = _parser(database, description).parse_args()
    entries = {database.name_of(entry): entry for entry in database.entries(_imported(database.source))}
    if options.worker:
        _work(database, [entries[name] for name in options.worker], options)
        return
    if strange := [name for name in options.only if name not in entries]:
        raise SystemExit(f"{database.program} has no {database.columns[0]} {', '.join(strange)}")
    sweep = _sweep(database, list(entries), options)
    names = sweep.selected(options, lambda name: not options.only or name in options.only)
    sweep.run(_tried(database, names, options), save=not options.no_save).print()


def _parser(database: Database, description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--dtype", default="float32", help="or autocast; all but float32 have tables of their own")
    parser.add_argument("--samples", type=int, default=0, help="the first so many of each, 0 for all; in a table of their own")
    parser.add_argument("--batch", type=int, default=database.batch, help="entries to a process")
    add_options(parser, database.limit_seconds)
    parser.add_argument("--worker", nargs="+", default=[], help=argparse.SUPPRESS)
    return parser


def _imported(source: str) -> ModuleType:
    try:
        return importlib.import_module(f"torch.testing._internal.{source}")
    except ImportError as error:
        raise SystemExit(f"torch's test database cannot be imported: {error}; python -m pip install -e '.[bench]'") from None


def _sweep(database: Database, names: list[str], options: argparse.Namespace) -> Sweep:
    """The table: one for each dtype and number of samples."""
    name = database.program.split(".")[-1]
    title = f"torch's {name} on {options.dtype}" + (f", the first {options.samples} samples of each" if options.samples else "")
    table = name + (f"_{options.dtype}" if options.dtype != "float32" else "") + (f"_first_{options.samples}" if options.samples else "")
    return Sweep(table, title, database.columns, names, database.summary)


def _tried(database: Database, names: list[str], options: argparse.Namespace) -> Iterator[Row]:
    settings = ["--dtype", options.dtype, "--samples", str(options.samples)]
    for row in answers([database.program, *settings], names, options.batch, options.limit_seconds, database.dead):
        yield {database.columns[0]: row.pop("name")} | row


def _work(database: Database, entries: list[Any], options: argparse.Namespace) -> None:
    """What a worker does: the rows of each entry, each as soon as it is known."""
    warnings.simplefilter("ignore")
    for entry in entries:
        for row in database.rows(entry, options.dtype, options.samples):
            told({"name": database.name_of(entry)} | row)
        told({"done": database.name_of(entry)})
