"""How many processors there are, and a second thread for what is made side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")
Made = TypeVar("Made")


class Helper:
    """Makes something of each item of a list, every second by a thread of its own where that is wanted and there is a processor for it."""

    def __init__(self, wanted: bool) -> None:
        self._pool = ThreadPoolExecutor(1) if wanted and processors() > 1 else None

    def __enter__(self) -> Helper:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def made_of(self, items: Sequence[T], function: Callable[[T], Made]) -> Iterator[Made]:
        """What a function makes of each item, in their order, as far as it is asked for."""
        others = iter([self._pool.submit(function, item) for item in items[1::2]] if self._pool is not None else ())
        for position, item in enumerate(items):
            other = next(others, None) if position % 2 else None
            yield function(item) if other is None else other.result()


def processors() -> int:
    """How many this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
