"""Keeps one idle process for the next who needs one, for a while: starting one takes seconds.

It is ended when nobody has taken it for `IDLE_S`, and with this process. A process that was forked off this one has none of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading

from lowtide.cost.lab.trial_process import TrialProcess

IDLE_S = 20.0  # it holds some hundred MiB meanwhile

_lock = threading.Lock()
_idle: list[tuple[TrialProcess, tuple[int, tuple[str, ...]]]] = []  # at most one, and the state that it was started from
_timers: list[threading.Timer] = []


def take() -> TrialProcess | None:
    """The idle process, if there is one that was started from a state like this one's. It is the caller's now."""
    process, state = _swap(None)
    if process is not None and state != _state():
        _end(process, state)
        return None
    return process


def put(process: TrialProcess) -> None:
    _end(*_swap(process))


def end() -> None:
    _end(*_swap(None))


def _swap(process: TrialProcess | None) -> tuple[TrialProcess | None, tuple[int, tuple[str, ...]]]:
    """Keep this process, or none; what was kept before."""
    state = _state()
    with _lock:
        before = _idle.pop() if _idle else (None, state)
        for timer in _timers:
            timer.cancel()
        _timers.clear()
        if process is not None:
            _idle.append((process, state))
            _timers.append(timer := threading.Timer(IDLE_S, end))
            timer.daemon = True
            with contextlib.suppress(RuntimeError):  # there is no thread to be had: it ends with this process
                timer.start()
    return before


def _end(process: TrialProcess | None, state: tuple[int, tuple[str, ...]]) -> None:
    if process is not None and state[0] == os.getpid():  # else it is the process's that this one was forked off
        process.end()


def _state() -> tuple[int, tuple[str, ...]]:
    return os.getpid(), tuple(map(str, sys.path))


atexit.register(end)
