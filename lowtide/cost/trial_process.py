"""A process of its own for what may crash or hang: it is asked line by line, and ended when it does not answer.

    takes   a setup and requests, both plain data
    leaves  replies, or `WorkerExitedError` with the reason

It runs `serve` of a module: of this one, where it tries calls. It is started by code that never changes and gets everything else over a
pipe, so that it neither runs the program's own main module nor needs a guard in it. Ctrl-C does not reach it: whoever asked ends it.
Importing torch takes it some seconds.

Keeps one idle process for the next who needs one, for a while: starting one takes seconds. It is ended when nobody has taken it for
`IDLE_S`, and with this process. A process that was forked off this one has none of its own.

The other end does nothing but try calls, one at a time, as it is asked to. Requests and replies are lines of JSON: data, never code. The
operators' own input and output lead nowhere, so that nothing mixes with the replies; the system ends the process when one call takes far
too long, also where nobody is left to do it.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any, TextIO, TypeAlias

_CODE = (  # the folder that this process happens to be in is no place to import from: it comes first where code is given as text
    "import sys; sys.path = [each for each in sys.path if each]; "
    "import json; setup = json.loads(sys.stdin.buffer.raw.readline()); sys.path[:] = setup['path']; "
    "import importlib; importlib.import_module(setup['module']).serve(setup)"
)
_START_S = 300.0  # a busy machine may take long to import torch
_SHOWN = 400  # characters of what the process said before it ended
Reply: TypeAlias = dict[str, Any]
Take: TypeAlias = Callable[[], Reply]

_GRACE_S = 30  # beyond the limit, at which whoever asked ends the process


class WorkerExitedError(Exception):
    """The process has ended, or was ended, before it answered."""


class WorkerTimeoutError(WorkerExitedError):
    """It did not answer in time."""


class TrialProcess:
    """One such process. Raises `WorkerExitedError` if it cannot be started.

    One that is not waited for imports what it needs meanwhile. `begin` waits for it.
    """

    def __init__(self, setup: dict[str, Any], module: str = "lowtide.cost.trial_process", *, waits: bool = True) -> None:
        self._process = _started()
        self._lines: queue.Queue[str] = queue.Queue()
        self._errors: list[str] = []
        self._readers: list[threading.Thread] = []
        try:
            self._listen()
            self._send({**setup, "module": module})
            if waits:
                self.begin()
        except BaseException:  # Ctrl-C too: nobody will end it later
            self.end()
            raise

    def begin(self) -> None:
        """Wait until it has imported what it needs. Raises `WorkerExitedError`."""
        self._reply(_START_S)

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """The reply to a request, for which modules are found where this process finds them. Raises `WorkerExitedError` if it has ended."""
        self._send(request)
        return self._reply(limit_s)

    def _reply(self, limit_s: float) -> dict[str, Any]:
        try:
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
        path = [each for each in sys.path if isinstance(each, str)]  # Python skips all else, too
        with contextlib.suppress(OSError):  # it has ended: there will be no reply either
            self._process.stdin.write(json.dumps({**request, "path": path}).encode() + b"\n")
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
_idle: list[tuple[TrialProcess, int]] = []  # at most one, and the process that has started it
_timers: list[threading.Timer] = []


def take() -> TrialProcess | None:
    """The idle process, if there is one that this process has started. It is the caller's now."""
    process, starter = _swap(None)
    return process if starter == os.getpid() else None


def put(process: TrialProcess) -> None:
    _end(*_swap(process))


def end() -> None:
    _end(*_swap(None))


def _swap(process: TrialProcess | None) -> tuple[TrialProcess | None, int]:
    """Keep this process, or none; what was kept before, and who has started that."""
    with _lock:
        before = _idle.pop() if _idle else (None, os.getpid())
        for timer in _timers:
            timer.cancel()
        _timers.clear()
        if process is not None:
            _idle.append((process, os.getpid()))
            _timers.append(timer := threading.Timer(IDLE_S, end))
            timer.daemon = True
            with contextlib.suppress(RuntimeError):  # there is no thread to be had: it ends with this process
                timer.start()
    return before


def _end(process: TrialProcess | None, starter: int) -> None:
    if process is not None and starter == os.getpid():  # else it is the process's that this one was forked off
        process.end()


atexit.register(end)


def serve(setup: dict[str, Any]) -> None:
    """Try calls until no more are asked for. `setup` is the first line that came in."""
    answer_all(setup, _warm_up, _answer)


def answer_all(setup: dict[str, Any], warm_up: Callable[[], object], answer: Callable[[dict[str, Any]], Reply]) -> None:
    """Answer requests until there are no more. The first reply says that what takes seconds once, `warm_up`, is done."""
    requests, replies = _private_channels()
    _no_core_dumps()
    warm_up()
    _reply(replies, {"ready": True})
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # errors up to here are read by whoever started this process
    for request in map(json.loads, requests):
        sys.path[:] = request["path"]
        with _time_limit(setup["limit_s"]):
            _reply(replies, answer(request))


def _warm_up() -> None:
    from lowtide.cost.trial import take_level

    ones = [{"made": ["float32", [1], [1], "cpu"]}]
    take_level({"values": ones, "steps": [{"op": "aten.relu.default", "args": [{"value": 0}], "kwargs": {}}]}, "cpu", True)


def _apply(settings: dict[str, Any], gradients: bool, device: str) -> None:
    """Take over the settings that decide which kernels run. Raises RuntimeError where they come to something else here."""
    import torch

    from lowtide.cost.operators import of_torch
    from lowtide.cost.trial import circumstances, on_gpu

    torch.set_num_threads(settings["threads"])
    torch.backends.mkldnn.set_flags(settings["onednn"])
    deterministic = settings["deterministic"], settings["warn_only"]
    if deterministic != (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()):
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])  # imports inductor, which takes a second
    torch.set_float32_matmul_precision(settings["precision"])
    torch.set_default_dtype(of_torch(settings["dtype"]))
    if on_gpu(device):
        for name, flag in settings["cudnn"].items():
            if getattr(torch.backends.cudnn, name) != flag:
                setattr(torch.backends.cudnn, name, flag)
    expected, got = settings["circumstances"], list(circumstances(device, gradients))
    if got != expected:
        raise RuntimeError(f"expected a process that works under {expected}, got one under {got}")


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from lowtide.cost.trial import answer, on_gpu, take_launches, take_level, take_times

    device, recipes, gradients = request["device"], request["recipes"], request["gradients"]

    def take() -> dict[str, Any]:
        _apply(request["settings"], gradients, device)
        _have(request["operators"])
        if request["wanted"] == "level":
            return take_level(recipes[0], device, gradients)
        if request["wanted"] == "launches":
            return take_launches(recipes, device, gradients)
        return take_times(recipes, device, gradients, request["warm_up"])

    return _on_gpu(answer, take, device) if on_gpu(device) else answer(take)


def _on_gpu(answer: Callable[[Take], Reply], take: Take, device: str) -> Reply:
    """The answer; with "shut" where this process may not use the GPU, with "spoilt" where it can no more."""
    import torch

    from lowtide.cost.trial import finish

    try:
        finish(device)
    except Exception as error:  # torch has several ways to say that there is no GPU
        return {"failure": f"{type(error).__name__}: {error}", "shut": True}
    reply = answer(take)
    try:
        finish(device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        return {"failure": reply.get("failure", f"{type(error).__name__}: {error}"), "spoilt": True}
    return reply


def _have(operators: list[dict[str, Any]]) -> None:
    """Load the libraries and import the modules that define operators which are not torch's own. Raises FormatError where that fails."""
    from lowtide.cost.operators import operator
    from lowtide.errors import FormatError

    for each in operators:
        reason = _import(each)
        try:
            schema = str(operator(each["op"])._schema)
        except FormatError as error:
            raise FormatError(f"{error}; the process that measures finds nothing to import that does{reason}") from error
        if schema != each["schema"]:
            raise FormatError(f"expected {each['schema']} in the process that measures, got {schema}")


def _import(needed: dict[str, Any]) -> str:
    """Import what may define an operator; why something could not be, for a message."""
    import torch

    reasons = []
    for library in needed["libraries"]:
        try:
            torch.ops.load_library(library)
        except Exception as error:  # a library may raise anything, and another may define the operator: the reason is told if none does
            reasons.append(f"{library}: {error}")
    for module in needed["modules"]:
        try:
            importlib.import_module(module)
        except Exception as error:  # the same of a module
            reasons.append(f"{module}: {type(error).__name__}: {error}")
    return f" ({'; '.join(reasons)})" if reasons else ""


def _reply(replies: TextIO, answer: dict[str, Any]) -> None:
    replies.write(json.dumps(answer) + "\n")
    replies.flush()


def _private_channels() -> tuple[TextIO, TextIO]:
    """The pipes that this process was started with; standard input and output lead nowhere from now on."""
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull, "r+") as nowhere:
        os.dup2(nowhere.fileno(), 0)
        os.dup2(nowhere.fileno(), 1)
    return requests, replies


def _no_core_dumps() -> None:
    """A call that crashes leaves no file behind."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextlib.contextmanager
def _time_limit(limit_s: float) -> Iterator[None]:
    """Past the limit the system ends the process, wherever it is."""
    if sys.platform == "win32":
        yield
        return
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_s + _GRACE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
