"""The commands, and what belongs to all of them."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Iterable

import typer

from lowtide.base import VERSION

_MODULES = {
    "optimize": "optimize", "explain": "optimize", "needs": "needs", "compile": "optimize", "report": "report", "devices": "needs",
    "order": "order", "place": "place", "edge": "edge",
}  # fmt: skip


def command_line(verbs: Iterable[str] = _MODULES) -> typer.Typer:
    """With these verbs. What others need is not imported, which takes longer than some verbs do."""
    app = typer.Typer(add_completion=False, no_args_is_help=True)
    app.callback()(_root)  # a verb alone is named, too
    for verb in verbs:
        app.command(verb)(getattr(importlib.import_module(f"lowtide.cli.{_MODULES[verb]}"), f"{verb}_command"))
    return app


def _print_version(version: bool) -> None:
    if version:
        typer.echo(f"lowtide {VERSION}")
        raise typer.Exit


_VERSION = typer.Option(False, "--version", is_eager=True, callback=_print_version, help="Print the version and exit.")


def _root(version: bool = _VERSION) -> None:
    """Run a PyTorch program in less memory, and say how much before it runs."""


def run() -> None:
    """Read the command line and do what it says. Raises SystemExit."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names come from the user's files, and not every terminal can write them
    if os.environ.get("COLUMNS", "1").strip("0") == "":
        del os.environ["COLUMNS"]  # of a terminal without columns: in none of them nothing can be told
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    command_line([verb] if verb in _MODULES else [] if verb == "--version" else _MODULES)()
