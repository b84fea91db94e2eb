"""How the command ends when somebody ends it: by an interrupt, or by closing the pipe it writes to. Imports nothing that takes long."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

REFUSED = 2  # as shells say of wrong usage
INTERRUPTED = 130  # as shells say of a program that ended by SIGINT
CLOSED_PIPE = 141  # and of one that ended by SIGPIPE
_STANDARD_OUTPUT = 1


def quit_on_interrupt() -> None:
    """From now on an interrupt ends the program at once, without a word: nothing has been begun. Not where interrupts are ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _quit)


def _quit(*_: Any) -> None:
    os._exit(INTERRUPTED)


@contextmanager
def interruptible() -> Iterator[None]:
    """In here an interrupt is a KeyboardInterrupt, for those who have something to save or to put back."""
    before = signal.getsignal(signal.SIGINT)
    if before is not _quit or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def output_is_closed() -> bool:
    """Whether nobody reads the pipe that is standard output any more."""
    waiting = select.poll()
    waiting.register(_STANDARD_OUTPUT, 0)
    return any(event & select.POLLERR for _, event in waiting.poll(0))


def leave_quietly(run: Callable[[], None]) -> None:
    """Run what ends by SystemExit. Where the reader of standard output has left early, nothing is said of it."""
    try:
        run()
    except SystemExit as end:
        _flush(end.code)
        raise
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    except OSError as error:  # in writing the answer: what happens to files is told where they are
        _end(error, 0)


def refuse_without_output() -> None:
    """End the program where standard output was closed before it began: there is nowhere to answer."""
    if sys.stdout is None:
        _end(OSError(errno.EBADF, os.strerror(errno.EBADF)), 0)


def _flush(code: Any) -> None:
    try:
        sys.stdout.flush()
    except OSError as error:
        _end(error, code)
    if code == 1:  # what typer and rich say of a closed pipe, and no command of ours of anything
        os._exit(CLOSED_PIPE)


def _end(error: OSError, code: Any) -> NoReturn:
    """End the program, as nothing can be written to standard output; whoever was refused has been told why."""
    if isinstance(error, BrokenPipeError):
        os._exit(CLOSED_PIPE)
    if code != REFUSED:
        print(f"lowtide: standard output: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(REFUSED)
