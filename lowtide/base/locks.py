"""Locks between processes and threads, on a file: with a limit to the wait, and without where the file system knows no locks."""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PATIENCE_SECONDS = 5.0  # whoever holds a lock of lowtide's reads and writes a small file
_PAUSE_SECONDS = 0.01
_given_up: set[Path] = set()  # what this process has waited for in vain: it asks again, but waits no more

if sys.platform == "win32":

    @contextmanager
    def locked(path: Path) -> Iterator[None]:
        """No lock: of two processes that write in the same instant one may have to do its work again."""
        yield

else:
    import fcntl

    @contextmanager
    def locked(path: Path) -> Iterator[None]:
        """Hold the lock of `path`, a file made for this. Raises OSError where that cannot be made, TimeoutError where others keep it."""
        # A FIFO or a terminal in the file's place holds nobody up, and a link leads nowhere.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "expected a regular file", str(path))
            _wait_for(descriptor, path)
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file open too
            os.close(descriptor)

    def _wait_for(descriptor: int, path: Path) -> None:
        until = time.monotonic() + (0 if path in _given_up else _PATIENCE_SECONDS)
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() >= until:
                    _given_up.add(path)
                    message = f"another process has held this lock for {_PATIENCE_SECONDS:g} seconds"
                    raise TimeoutError(errno.ETIMEDOUT, message, str(path)) from error
            except OSError:  # a network's file system without locks: files are replaced as a whole all the same
                return None
            time.sleep(_PAUSE_SECONDS)
