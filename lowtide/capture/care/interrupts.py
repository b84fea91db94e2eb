"""Ctrl-C during a capture, where Python runs within what can hand on no exception: it comes a moment later.

The signal comes to Python at the next bytecode, which after a while in C++ is often the first one of such a function. Raised there it
would end the process, or be lost.
"""

from __future__ import annotations

import signal
import threading
import time
from _thread import interrupt_main, start_new_thread
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_HAND_ON_NONE = {
    "find_torch_dispatch_rule",  # of torch/_library/simple_registry.py: C++ asks it at each call under a mode, and ends the process
    "_note_end",  # of draft.py, the callback of a weak reference: Python prints what it raises
}
_DEPTH = 4  # of the calls that they make
_LATER_S = 0.001


@contextmanager
def interrupts_that_can_be_taken() -> Iterator[None]:
    """While this lasts, Ctrl-C reaches the caller's own handler where an exception can go up from there."""
    handler: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return

    def later_or_now(number: int, frame: FrameType | None) -> None:
        if _hands_on_none(frame):
            start_new_thread(_interrupt_later, ())  # threading's own threads are waited for, and interrupted meanwhile
        else:
            handler(number, frame)

    signal.signal(signal.SIGINT, later_or_now)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is later_or_now:
            signal.signal(signal.SIGINT, handler)


def _interrupt_later() -> None:
    time.sleep(_LATER_S)
    interrupt_main()


def _hands_on_none(frame: FrameType | None) -> bool:
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_code.co_name in _HAND_ON_NONE:
            return True
        frame = frame.f_back
    return False
