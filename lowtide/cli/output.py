"""What all commands take and say alike: options, figures as JSON, sizes, refusals in one line, and what may be written where."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias

import typer
from rich.console import Console

from lowtide.base.files import check_writable, write_whole
from lowtide.base.messages import bytes_text
from lowtide.cli.exit import CLOSED_PIPE, REFUSED, output_is_closed
from lowtide.errors import FormatError, LowtideError

STANDARD_OUTPUT = "-"
_LONGEST_LINE, _NAME_LENGTH = 2000, 60  # characters

# Options that several commands have.
JsonOut: TypeAlias = Annotated[str | None, typer.Option("--json", metavar="OUT", help="write the answer as JSON; - for standard output")]
BatchSize: TypeAlias = Annotated[int | None, typer.Option(min=1, help="call the function with this batch_size")]
Dynamic: TypeAlias = Annotated[
    str | None, typer.Option(metavar="JSON", help='extents that vary, by argument and dimension: \'{"0": {"0": [2, 64]}}\'; or auto')
]
FollowedOn: TypeAlias = Annotated[str | None, typer.Option(help="with --fake: the device to be followed on; cuda needs no GPU")]
Swap: TypeAlias = Annotated[bool, typer.Option(help="under a limit, let tensors go to the host and back, where there is one to swap to")]
_STATE = "where parameters and optimizer state lie: device; swap, they may go within a step; host, the optimizer's lies there between steps"
State: TypeAlias = Annotated[str, typer.Option(metavar="PLACE", help=_STATE)]


def write_json(target: str, figures: Mapping[str, Any]) -> None:
    """Write figures to a file, whole or not at all, or to standard output. Raises OSError."""
    lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in figures.items())  # a long order is still one line
    text = "{\n" + ",\n".join(lines) + "\n}"
    if target == STANDARD_OUTPUT:
        write_answer(text + "\n")
    else:
        write_whole(target, text + "\n")


def write_answer(text: str) -> None:
    """Write to standard output. Raises OSError, which names it."""
    try:
        typer.echo(text, nl=False)
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from error


def check_targets(targets: Mapping[str, str | os.PathLike[str] | None], problem: Path | None = None) -> None:
    """Refused before the search, not after it: a file that cannot be written, or that two options name, or that is the problem itself.

    `targets` are by option. Raises FormatError.
    """
    first: dict[str | Path, str] = {}
    for option, given in targets.items():
        if given is None:
            continue
        target = os.fspath(given)
        _check_target(option, target, problem)
        position = target if target == STANDARD_OUTPUT else Path(target).absolute()
        if first.setdefault(position, option) != option:
            raise FormatError(f"{option} {target}: expected another file than that of {first[position]}")


def _check_target(option: str, target: str, problem: Path | None) -> None:
    if target == STANDARD_OUTPUT:
        return
    path = Path(target)
    if path.is_dir():
        raise FormatError(f"{option} {target}: expected a file, got a folder")
    if not path.parent.is_dir():
        raise FormatError(f"{option} {target}: expected a file in a folder that exists: No such file or directory: {path.parent}")
    if problem is not None and path.exists() and problem.exists() and path.samefile(problem):
        raise FormatError(f"{option} {target}: expected another file than the problem itself")
    try:
        check_writable(target)
    except OSError as error:
        raise FormatError(f"{option} {target}: expected a file that can be written: {error.strerror}") from error


@contextmanager
def prints_aside(target: str | None) -> Iterator[None]:
    """Where standard output is kept for the answer alone: in here whatever the user's code prints goes to standard error."""
    if target != STANDARD_OUTPUT:
        yield
        return
    with redirect_stdout(sys.stderr), _descriptors_aside():
        yield


@contextmanager
def _descriptors_aside() -> Iterator[None]:
    """The same for those who write without Python: libraries in C, and programs that are started."""
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def say(*lines: object) -> None:
    """Lines as they are, on standard output: nothing in them is markup, and long ones are the terminal's to break."""
    for line in lines:
        Console().print(str(line), highlight=False, markup=False, soft_wrap=True)


def memory_limits(text: str | None) -> str | dict[str, int | str] | None:
    """A limit as `--memory` has it: of one memory, or by name: "cuda=24GiB,host=48GiB". What is no limit is refused where it is read."""
    if text is None or "=" not in text:
        return text
    pairs = [each.strip().partition("=") for each in text.split(",")]
    names = [name.strip() for name, _, _ in pairs]
    if len(set(names)) < len(names):
        refuse(f"--memory {text}: expected each memory once")
    return {name: int(amount) if amount.strip().isdecimal() else amount for name, (_, _, amount) in zip(names, pairs, strict=True)}


def exact_bytes(nbytes: int) -> str:
    return bytes_text(nbytes) if nbytes < 1024 else f"{bytes_text(nbytes)} ({nbytes:,} bytes)"


@contextmanager
def refusals(*more: type[Exception]) -> Iterator[None]:
    """What is refused in here, or cannot be read, written or imported, ends the command in one line; and `more` kinds of errors."""
    kinds: tuple[type[Exception], ...] = (LowtideError, OSError, ImportError, *more)
    try:
        yield
    except kinds as error:
        refuse(error)


def refuse(error: object, *lines: str) -> NoReturn:
    """One clear line on standard error, perhaps lines that say where, and exit code 2. Of a closed standard output nothing is said."""
    if isinstance(error, BrokenPipeError) and output_is_closed():
        raise typer.Exit(CLOSED_PIPE)
    typer.echo(f"lowtide: {shortened(printable(_text(error)), _LONGEST_LINE)}", err=True)
    for line in lines:
        typer.echo(f"  {shortened(printable(line), _LONGEST_LINE)}", err=True)
    raise typer.Exit(REFUSED)


def printable(text: str) -> str:
    """A text from outside on one line, with escapes in place of what could break the line, steer a terminal, or not be encoded."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def shortened(text: str, longest: int) -> str:
    """The start and the end of a text of more than `longest` characters."""
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 4 :]}"


def short_name(name: str) -> str:
    """A name from outside, for a cell of a table."""
    return shortened(printable(name), _NAME_LENGTH)


def _text(error: object) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
