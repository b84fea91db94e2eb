"""A search that can be stopped: its last answer, the seconds it took, and whether it came to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.console import Console

from lowtide.cli.exit import interruptible

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class SearchAnswer(Generic[Answer]):
    """What a search came to."""

    last: Answer | None  # None where it was interrupted before its first answer
    seconds: float  # of the search alone, without loading or compiling its kernels
    interrupted: bool


def until_interrupted(prepare: Callable[[], None], answers: Iterable[Answer], describe: Callable[[Answer], str]) -> SearchAnswer[Answer]:
    """All answers until there are no more or an interrupt; a second interrupt is not held back.

    On a terminal the best so far is shown while the search goes on, on standard error.
    """
    last, interrupted, started = None, False, time.perf_counter()
    try:
        with interruptible(), Console(stderr=True).status("loading the solver's kernels") as spinner:
            prepare()
            started = time.perf_counter()
            spinner.update("searching")
            for last in answers:
                spinner.update(f"{describe(last)}; Ctrl-C to stop here")
    except KeyboardInterrupt:
        interrupted = True
    return SearchAnswer(last, time.perf_counter() - started, interrupted)
