"""Errors of the user's own code: the error in a line, where in the user's files it was, and exit code 2."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from lowtide.cli.exit import interruptible
from lowtide.cli.output import refuse
from lowtide.errors import LowtideError

_LIBRARIES = {
    Path(__file__).resolve().parents[1],
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")),
}
_MOST_LINES = 6


@contextmanager
def users_code(spec: str, *, alone: bool = False) -> Iterator[None]:
    """What the user's code raises in here is told as an error of that code; `alone`: nothing else runs in here.

    What lowtide refuses, and errors of its own, come out as they are. An interrupt is a KeyboardInterrupt.
    """
    try:
        with interruptible():
            yield
    except (LowtideError, typer.Exit):
        raise
    except SystemExit as error:
        refuse(f"{spec}: expected code that returns, got one that ends the program with exit code {error.code}", *_lines(error))
    except Exception as error:  # the user's code may raise anything: it is the user's error, told with their lines
        lines = _lines(error)
        if not lines and not alone:
            raise
        refuse(f"{spec}: {type(error).__name__}: {error}", *lines)


def _lines(error: BaseException) -> list[str]:
    """The user's own lines on the way to an error, the innermost last."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    lines = [f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}" for frame in frames]
    if isinstance(error, SyntaxError) and error.filename is not None:
        lines.append(f"{error.filename}:{error.lineno}: {(error.text or '').strip()}")
    return lines[-_MOST_LINES:]


def _is_users(filename: str) -> bool:
    path = Path(filename).resolve()
    return not filename.startswith("<") and not any(folder in path.parents for folder in _LIBRARIES)
