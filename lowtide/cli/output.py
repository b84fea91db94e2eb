"""What all commands say alike: figures as JSON, sizes, refusals in one line, and what may be written where."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import typer

from lowtide.errors import FormatError
from lowtide.ir.files import write_whole
from lowtide.ir.summary import bytes_text

STANDARD_OUTPUT = "-"
_USAGE_ERROR = 2
_LONGEST_LINE = 2000


def write_json(target: str, figures: Mapping[str, Any]) -> None:
    """Write figures to a file, whole or not at all, or to standard output. Raises OSError."""
    lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in figures.items())  # a long order is still one line
    text = "{\n" + ",\n".join(lines) + "\n}"
    if target == STANDARD_OUTPUT:
        typer.echo(text)
    else:
        write_whole(target, text + "\n")


def check_target(option: str, target: str | None, problem: Path) -> None:
    """Refused before the search, not after it: a file that cannot be written, or that would replace the problem. Raises FormatError."""
    if target is None or target == STANDARD_OUTPUT:
        return
    path = Path(target)
    if path.is_dir():
        raise FormatError(f"{option} {target}: expected a file, got a folder")
    if not path.parent.is_dir():
        raise FormatError(f"{option} {target}: expected a file in a folder that exists: No such file or directory: {path.parent}")
    if path.exists() and problem.exists() and path.samefile(problem):
        raise FormatError(f"{option} {target}: expected another file than the problem itself")


def exact_bytes(nbytes: int) -> str:
    """A size for people, and to the byte."""
    return bytes_text(nbytes) if nbytes < 1024 else f"{bytes_text(nbytes)} ({nbytes:,} bytes)"


def refuse(error: object) -> NoReturn:
    """One clear line on standard error and exit code 2."""
    typer.echo(f"lowtide: {shortened(printable(_text(error)), _LONGEST_LINE)}", err=True)
    raise typer.Exit(_USAGE_ERROR)


def printable(text: str) -> str:
    """A text from outside on one line, with escapes in place of what could break the line, steer a terminal, or not be encoded."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def shortened(text: str, longest: int) -> str:
    """The start and the end of a text of more than `longest` characters."""
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 4 :]}"


def _text(error: object) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
