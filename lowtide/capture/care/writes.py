"""What a program does to files, networks, other processes and the environment: refused at the call, before it is done."""

from __future__ import annotations

import builtins
import io
import os
import pathlib
import queue
import reprlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import connection
from typing import Any, NoReturn

import torch

from lowtide.capture.care.instances import reaches
from lowtide.capture.care.turns import all_replaced, listed
from lowtide.capture.sources import asker, is_library, users_line
from lowtide.errors import CaptureError

_PATHS = getattr(pathlib, "_NormalAccessor", None)  # of Python 3.10, where paths have functions of `os` and `io` of their own
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_refused: list[list[CaptureError]] = []  # of the captures under way, the innermost last


@contextmanager
def outside_unchanged() -> Iterator[None]:
    """Raise CaptureError where what runs inside would change something outside of Python, also where the program catches it."""
    refused: list[CaptureError] = []
    of_files = ((name, changes) for (owner, name), changes in _CALLS.items() if owner is (io if name == "open" else os))
    of_paths = {(_PATHS, name): changes for name, changes in of_files if hasattr(_PATHS, name)}
    calls = (
        (owner, name, partial(_refusing, f"{'Path' if owner is _PATHS else owner.__name__}.{name}", changes))
        for (owner, name), changes in (_CALLS | of_paths).items()
    )
    with listed(_refused, refused), all_replaced(calls):
        yield
        if refused:
            raise refused[0]


def refuse_once(what: str) -> NoReturn:
    """The program does something that no step would do again."""
    refuse(
        CaptureError(
            f"the program {what} at {users_line()}, which would be done once, by the capture, and by no step: do it behind the step, with "
            "what the step returns (in a framework in its hook behind a batch); if a first call alone does so, call the loss once before"
        )
    )


def refuse(error: CaptureError) -> NoReturn:
    """Raise it, also where the program catches it."""
    if _refused:
        _refused[-1].append(error)
    raise error


def _refusing(called: str, changes: Callable[..., Any], before: Callable[..., Any]) -> Callable[..., Any]:
    """The function, but for what it would change for the user. Libraries may fill caches, and ask other programs."""

    def refusing(*args: Any, **kwargs: Any) -> Any:
        if (file := asker(sys._getframe(2))) and changes(*args, **kwargs):
            text = f"{called}({', '.join(reprlib.repr(os.fspath(each) if isinstance(each, os.PathLike) else each) for each in args)})"
            if not is_library(file) or (called.endswith(".open") and "cache" not in str(args[0])):
                refuse_once(f"calls {text}")
        return before(*args, **kwargs)

    return refusing


def _opens(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> bool:
    return bool({*mode} & {*"wax+"}) and file != os.devnull


_ALWAYS: dict[Any, str] = {
    os: "read write pwrite writev remove unlink rename replace rmdir truncate ftruncate link symlink mkfifo chmod chdir kill system",
    socket.socket: "connect send sendall sendto sendmsg sendfile recv recv_into recvfrom recvfrom_into recvmsg",
    connection.Connection: "send send_bytes recv recv_bytes recv_bytes_into",
}
_CALLS: dict[tuple[Any, str], Callable[..., Any]] = {
    (builtins, "open"): _opens,
    (io, "open"): _opens,
    (os, "open"): lambda file, flags, *args, **kwargs: flags & _WRITES,
    (os, "mkdir"): lambda file, *args, **kwargs: not os.path.isdir(file),
    (os, "putenv"): lambda name, value: os.environ.get(os.fsdecode(name)) != os.fsdecode(value),
    (os, "unsetenv"): lambda name: os.fsdecode(name) in os.environ,
    (torch, "save"): lambda item, file, *args, **kwargs: not isinstance(file, io.BytesIO),
    (subprocess.Popen, "__init__"): lambda *args, **kwargs: True,
    **{(queue.Queue, name): lambda item, *args, **kwargs: reaches(item) for name in ("get", "put")},
    **{(owner, name): lambda *args, **kwargs: True for owner, names in _ALWAYS.items() for name in names.split() if hasattr(owner, name)},
}
