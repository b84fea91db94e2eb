"""The stages of an optimisation, told to whoever listens: timing, the line on a terminal and the log come from here."""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias


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
