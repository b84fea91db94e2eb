"""A process of its own for what may crash or hang: it is asked line by line, and ended when it does not answer.

    takes   a setup and requests, both plain data
    leaves  replies, or `WorkerExitedError` with the reason

It runs `serve` of a module: of `worker`, where it tries calls. It is started by code that never changes and gets everything else over a
pipe, so that it neither runs the program's own main module nor needs a guard in it. Ctrl-C does not reach it: whoever asked ends it.
Importing torch takes it some seconds.

Keeps one idle process for the next who needs one, for a while: starting one takes seconds. It is ended when nobody has taken it for
`IDLE_S`, and with this process. A process that was forked off this one has none of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from typing import IO, Any

_CODE = (  # the folder that this process happens to be in is no place to import from: it comes first where code is given as text
    "import sys; sys.path = [each for each in sys.path if each]; "
    "import json; setup = json.loads(sys.stdin.buffer.raw.readline()); sys.path[:] = setup['path']; "
    "import importlib; importlib.import_module(setup['module']).serve(setup)"
)
_START_S = 300.0  # a busy machine may take long to import torch
_SHOWN = 400  # characters of what the process said before it ended


class WorkerExitedError(Exception):
    """The process has ended, or was ended, before it answered."""


class WorkerTimeoutError(WorkerExitedError):
    """It did not answer in time."""


class TrialProcess:
    """One such process. Raises `WorkerExitedError` if it cannot be started.

    One that is not waited for is told what to do by `begin`, from another thread.
    """

    def __init__(self, setup: dict[str, Any], module: str = "lowtide.cost.worker", *, waits: bool = True) -> None:
        self._process = _started()
        self._lines: queue.Queue[str] = queue.Queue()
        self._errors: list[str] = []
        self._readers: list[threading.Thread] = []
        self._setup = {
            **setup,
            "module": module,
            "path": [each for each in sys.path if isinstance(each, str)],
        }  # Python skips all else, too
        try:
            self._listen()
            if waits:
                self.begin()
        except BaseException:  # Ctrl-C too: nobody will end it later
            self.end()
            raise

    def begin(self) -> None:
        """Wait until it has imported what it needs. Raises `WorkerExitedError`."""
        self.ask(self._setup, _START_S)

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """The reply to a request. Raises `WorkerExitedError`; the process has then ended."""
        try:
            self._send(request)
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            self.end()
            raise WorkerTimeoutError(f"it did not come back within {limit_s:g} s") from None
        if not line:
            raise WorkerExitedError(self._last_words())
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError:
            self.end()
            raise WorkerExitedError(f"it answered {line[:_SHOWN]!r}") from None
        return reply

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join(1)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError, ValueError):
                if pipe is not None:
                    pipe.close()

    def _listen(self) -> None:
        try:
            self._readers.append(_reading(self._process.stdout, self._lines.put))
            self._readers.append(_reading(self._process.stderr, self._errors.append))
        except RuntimeError as error:
            raise WorkerExitedError(f"nobody can listen to it ({error})") from error

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: there will be no reply either
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def _last_words(self) -> str:
        self.end()
        code = self._process.returncode
        words = " ".join("".join(self._errors).split())[-_SHOWN:]
        how = f"it ended with code {code}" if code >= 0 else f"it was ended by {_signal(-code)}"
        return f"{how}: {words}" if words else how


def _started() -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise WorkerExitedError("this Python does not know its own executable")
    apart: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    try:
        return subprocess.Popen([sys.executable, *_flags(), "-c", _CODE], **pipes, **apart)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise WorkerExitedError(f"it cannot be started ({type(error).__name__}: {error})") from error


def _flags() -> list[str]:
    """What keeps this Python from its surroundings keeps the other from them, too."""
    flags = {"-I": sys.flags.isolated, "-E": sys.flags.ignore_environment, "-s": sys.flags.no_user_site, "-B": sys.dont_write_bytecode}
    return [flag for flag, is_set in flags.items() if is_set]


def _reading(pipe: IO[bytes] | None, take: Any) -> threading.Thread:
    """A thread that hands on each line of a pipe, and "" at its end: a pipe alone cannot be waited for with a limit everywhere."""

    def read() -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in pipe or ():
                take(line.decode(errors="replace"))
        take("")

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def _signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"{name}, as the system does where memory runs out" if name == "SIGKILL" else name


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
