"""What people are told: sizes, times and operators in words, warnings that name their own line, what is not installed, and stages.

The stages of an optimisation are told to whoever listens: timing, the line on a terminal and the log come from here.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def bytes_text(nbytes: int) -> str:
    """A size for people: "12.34 MiB"; exact below a KiB. KiB = 2^10, MiB = 2^20, GiB = 2^30 bytes."""
    for unit, size in _UNITS:
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


def time_text(us: float) -> str:
    """A time for people: "3.10 ms"."""
    return f"{us / 1e6:.2f} s" if us >= 1e6 else f"{us / 1e3:.2f} ms" if us >= 100 else f"{us:.1f} us"


def op_text(op: str) -> str:
    """An operator without its namespace and overload: "gelu" of "aten.gelu.default"."""
    return op.split(".")[1] if op.count(".") == 2 else op


def less_text(nbytes: int, before_bytes: int) -> str:
    """How much less that is than it was: "12.5% less", or more; nothing beside nothing."""
    share = 1 - nbytes / before_bytes if before_bytes else 0.0
    return "" if not before_bytes else f"{share:.1%} less" if share >= 0 else f"{-share:.1%} more"


_PASSED_OVER = (str(Path(__file__).parents[1]), contextlib.__file__)


def warn(sentence: str, category: type[Warning] = UserWarning) -> None:
    """`warnings.warn`, at the first caller that is no file of the package's, whose context managers lie between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED_OVER):
        frame, level = frame.f_back, level + 1
    warnings.warn(sentence, category, stacklevel=level)


def need(module: str, user: object, extra: str) -> ModuleType:
    """The module, imported. Raises ImportError saying who needs it and what to install."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ImportError(f"{user} needs {package}, which is not installed: pip install 'lowtide[{extra}]'") from error


@dataclass(frozen=True)
class Stage:
    """One stage, at its start (`seconds` is None) or at its end."""

    name: str  # "capture", "measure", "compile", "order", "arena"
    what: str  # a sentence for people
    seconds: float | None = None


_LONG_S = 5.0  # from here on a stage is worth a line where nobody looks on
_LOGGER = logging.getLogger("lowtide")

Callback: TypeAlias = Callable[[Stage], None]
Say: TypeAlias = Callable[[object], None]


@dataclass
class Stages:
    """Runs stages, times them and tells about them."""

    callback: Callback | None = None
    progress: bool = False
    seconds: dict[str, float] = field(default_factory=dict)  # by stage, summed

    @contextmanager
    def stage(self, name: str, what: str) -> Iterator[Say]:
        """Everything inside belongs to the stage; what it yields shows how far that has come."""
        start = time.perf_counter()
        self._tell(Stage(name, what))
        if self.progress:
            with _status(f"lowtide: {what}") as line:
                yield lambda progress: line.update(f"lowtide: {what}: {progress}")
        else:
            yield _say_nothing
        spent = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + spent
        self._tell(Stage(name, what, spent))
        if spent > _LONG_S and not self.progress:
            _LOGGER.info("%s took %.0f s", what, spent)

    def _tell(self, stage: Stage) -> None:
        if self.callback is not None:
            self.callback(stage)


def _say_nothing(progress: object) -> None:
    """Nobody looks on."""


def _status(text: str) -> Any:
    """A line on standard error that says what is done. rich draws from Python's generator when it is imported: not the program's draws."""
    state = random.getstate()
    from rich.console import Console

    random.setstate(state)
    return Console(stderr=True).status(text)


def wants_progress(progress: bool | None) -> bool:
    """The caller's wish; without one, progress is shown where somebody looks on."""
    return sys.stderr.isatty() if progress is None else progress
