"""What this process has to work with: its processors, a second thread for what is made side by side, and Python's garbage collector.

While much is made that stays, the collector looks at all of it, again and again, and finds nothing. Looking was a fifth of the time of
GPT-2's capture and plan.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")
Made = TypeVar("Made")
_OBJECTS = 100_000  # made since the last look, before the next
_GROWTH = 2  # of all that is in memory until all is looked at: by itself the collector does not count what is set aside and back
_LEFT_OUT = 100  # times
_OF_PYTHON = 5_000  # objects that it freezes itself as it starts: 375 in 3.12


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


class _Seldom:
    """Who asks for it now, in whatever thread: the last of them puts back what the first one found."""

    lock = threading.Lock()
    count, before = 0, gc.get_threshold()


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Have the collector look less often while a program is captured and planned, and as before afterwards.

    What it would find is found later. A collector that the caller has switched off stays so.
    """
    with _Seldom.lock:
        if _Seldom.count == 0:
            _Seldom.before = gc.get_threshold()
            if 0 < _Seldom.before[0] < _OBJECTS:
                gc.set_threshold(_OBJECTS, *_Seldom.before[1:])
        _Seldom.count += 1
    try:
        yield
    finally:
        with _Seldom.lock:
            _Seldom.count -= 1
            if _Seldom.count == 0:
                gc.set_threshold(*_Seldom.before)


class _Aside:
    ours = False  # whether what is frozen is so by `set_aside`
    blocks = 0  # of Python's memory, when all objects were last looked at: to count those takes a hundred times as long
    left_out = 0  # how often it is yet taken for granted that the caller has frozen what he has: Python counts all of it when asked


@contextmanager
def set_aside() -> Iterator[None]:
    """Have the collector and its lists leave out what is there now: what is made meanwhile is found in no time.

    Nothing is set aside where the caller has frozen what he has, or within another of these.
    """
    ours = not _Aside.ours and not _is_frozen()
    _Aside.ours |= ours
    try:
        if ours:
            _freeze()
        yield
    finally:
        if ours:
            look_at_all()


def _is_frozen() -> bool:
    if _Aside.left_out:
        _Aside.left_out -= 1
        return True
    frozen = gc.get_freeze_count() >= _OF_PYTHON
    _Aside.left_out = _LEFT_OUT if frozen else 0
    return frozen


def _freeze() -> None:
    """What was let go since is found first, now and then: the collector would never look for it again by itself."""
    blocks = sys.getallocatedblocks()
    if not _Aside.blocks:
        _Aside.blocks = blocks
    elif gc.isenabled() and blocks > _GROWTH * _Aside.blocks:
        gc.collect()
        _Aside.blocks = sys.getallocatedblocks()
    gc.freeze()


def look_at_all() -> None:
    """End what `set_aside` began: who holds an object is asked of all others."""
    if _Aside.ours:
        gc.unfreeze()
        _Aside.ours = False
