"""Modules compiled by inductor, kept as artifacts beside what the system's compiler builds; several beside one another.

    takes   a torch.fx module, what it is given (as descriptions of tensors), a text that says all that it computes
    leaves  a function of the same arguments, or NativeError, which says why there is none

An artifact is taken from lowtide's cache where it was made before, by the same torch for the same machine; inductor keeps what it compiles
of it in a cache of its own.

Several bodies are compiled in this process and in some of their own. Inductor's Python takes a quarter of the time and is not made for
threads, so that each process compiles a body at a time. Of processes there are as many as torch's own setting allows
(TORCHINDUCTOR_COMPILE_THREADS), and no more than pay for importing torch. One that cannot be had, or that ends before it has answered,
leaves its body to this one.

A body for a GPU is compiled in this process: another one would take memory of the GPU.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import tempfile
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import fx

from lowtide.base import VERSION
from lowtide.base.files import directory
from lowtide.cost.trial_process import TrialProcess, WorkerExitedError
from lowtide.runtime.libraries import LibraryRecipe, NativeError, library, processor, unsealed

Run = Callable[..., list[Any]]
_MODULE = "lowtide.regions.compilation"
_LIMIT_S = 300.0  # for one body
_BODIES = 4  # for which it pays to start a process
_MOST = 8  # processes: each takes some 400 MiB

_begun: list[TrialProcess] = []  # at most one, which begins while its bodies are not known yet


class TensorSpec(NamedTuple):
    """A tensor that a module is given; a number is one of no dimensions."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str


_looking: list[threading.Thread] = []  # at most one


def begin() -> None:
    """Import inductor, which takes a second, and let it look what processor and compiler can do, which takes several, in a thread."""
    with suppress(Exception), _quiet():  # whoever compiles is told
        import_module("torch._inductor.compile_fx")
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        def pick() -> None:
            with suppress(Exception):
                pick_vec_isa()

        if not _looking:
            _looking.append(threading.Thread(target=pick, name="lowtide-looks-at-the-processor", daemon=True))
            _looking[0].start()


def processes() -> int:
    """How many processes may compile at once: inductor's own setting."""
    with suppress(Exception):
        from torch._inductor import config

        return int(config.compile_threads or 1)
    return 1


def has_compiled() -> bool:
    """Whether anything lies in the cache that inductor has compiled, for whatever circumstances."""
    folder = directory()
    return folder is not None and any((folder / "native").glob("inductor-*.bin"))


def is_compiled(text: str) -> bool:
    """Whether what `compiled` gives for a text is in the cache, or cannot be kept there."""
    folder = directory()
    return folder is None or (folder / "native" / _name(text)).exists()


def compile_sample(path: Path) -> None:
    """Have the simplest module compiled, and with it what all have in common. Raises NativeError."""

    def module() -> fx.GraphModule:
        graph = fx.Graph()
        graph.output((graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),)),))
        return fx.GraphModule({}, graph)

    _compile(module, [TensorSpec((64,), (1,), "float32", "cpu")], path)


def compiled(text: str, module: Callable[[], fx.GraphModule], specs: Sequence[TensorSpec]) -> Run:
    """What runs a module. Raises NativeError."""
    making = LibraryRecipe("what inductor compiles", partial(_compile, module, specs), _opened, is_library=False)
    run: Run = library(directory(), _name(text), making)
    return run


@lru_cache(1024)
def number(value: float) -> torch.Tensor:
    """A number as modules take it. Nobody writes it; most are the same from step to step, or for all parameters of one."""
    return torch.from_numpy(numpy.array(value, numpy.float64))  # as numbers are, outside of the memory that is planned


def circumstances(device: str) -> str:
    """All that what is compiled depends on beside what it computes."""
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
    where = (platform.machine(), processor(), os.environ.get("CXX", ""), str(torch.get_num_threads()), gpu)
    return "\0".join((torch.__version__, VERSION, *where))


def _name(text: str) -> str:
    return f"inductor-{hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()[:24]}.bin"


def _compile(module: Callable[[], fx.GraphModule], specs: Sequence[TensorSpec], path: Path) -> None:
    with _as_native_errors("inductor cannot compile it"):
        from torch._inductor import config, standalone_compile  # takes a second, and is wanted by few
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        mode = FakeTensorMode(shape_env=ShapeEnv())
        with mode:
            fakes: list[Any] = [
                torch.empty_strided(spec.shape, spec.stride, dtype=getattr(torch, spec.dtype), device=spec.device) for spec in specs
            ]
        with torch.no_grad(), config.patch(compile_threads=1):
            graph = module()
            artifact = standalone_compile(graph, fakes, **_told_of(mode, fakes, graph, standalone_compile))
        artifact.save(path=str(path), format="binary")


def _told_of(mode: Any, fakes: Sequence[Any], graph: fx.GraphModule, compiler: Callable[..., Any]) -> dict[str, Any]:
    """How inductor is told whose fakes these are: that of torch 2.11 looks for the mode at what the graph gives, or makes another."""
    if "fake_mode" in inspect.signature(compiler).parameters:
        return {"dynamic_shapes": "from_example_inputs", "fake_mode": mode}
    for given in graph.graph.output_node().all_input_nodes:
        given.meta["example_value"] = fakes[0]
    return {"dynamic_shapes": "from_graph"}


def _opened(path: Path) -> Run:
    with _as_native_errors("what inductor has compiled does not load"), tempfile.NamedTemporaryFile(prefix="lowtide-artifact-") as file:
        from torch._inductor import CompiledArtifact  # type: ignore[attr-defined]

        file.write(unsealed(path.read_bytes()))
        file.flush()
        run: Run = CompiledArtifact.load(path=file.name, format="binary")
    return run


@contextmanager
def _as_native_errors(what: str) -> Iterator[None]:
    """Its warnings are its own; whatever it, its compilers and the disk raise, assertions about another torch's artifact too, is told."""
    for thread in _looking:
        thread.join()  # two that look are slower than one
    try:
        with _quiet():
            yield
    except NativeError:
        raise
    except Exception as error:
        raise NativeError(f"{what} ({_first_line(error)})") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """What inductor's passes warn of is their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def begun_ahead(device: str) -> Iterator[None]:
    """Meanwhile what needs no body goes on: inductor looks at the processor, and compiles what all kernels share."""
    if device != "cpu":
        yield
        return
    begin()
    if not has_compiled() and processes() > 1 and not _begun:
        with suppress(WorkerExitedError):
            _begun.append(_started(is_first=True))
    try:
        yield
    finally:
        while _begun:
            _begun.pop().end()


def compile_all(texts: Mapping[str, str], here: Callable[[str], object], say: Callable[[float], object]) -> dict[str, str]:
    """Have bodies compiled; for those that could not be, why."""
    jobs = _Jobs(texts)
    workers: list[TrialProcess] = []
    try:
        for _ in range(min(processes(), _MOST, -(-len(texts) // _BODIES)) - 1):
            with suppress(WorkerExitedError):
                workers.append(_begun.pop() if _begun else _started(is_first=False))
                threading.Thread(target=jobs.feed, args=(workers[-1],), name="lowtide-compiles", daemon=True).start()
        jobs.work(here, say)
    finally:
        jobs.drop()
        for worker in workers:
            worker.end()
    return jobs.reasons


def _started(*, is_first: bool) -> TrialProcess:
    setup: dict[str, Any] = {"limit_s": _LIMIT_S, "threads": torch.get_num_threads(), "is_first": is_first}
    return TrialProcess(setup, _MODULE, waits=False)


class _Jobs:
    """Bodies that nobody compiles yet, and what became of the others."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.reasons: dict[str, str] = {}
        self._texts, self._open, self._busy = texts, deque(texts), 0
        self._changed = threading.Condition()

    def work(self, here: Callable[[str], object], say: Callable[[float], object]) -> None:
        """Compile in this process, until all is done, here or elsewhere."""
        while (key := self._next(waits=True)) is not None:
            try:
                here(key)
            except NativeError as error:
                self.reasons[key] = str(error)
            self._is_done()
            say(1 - (len(self._open) + self._busy) / len(self._texts))

    def feed(self, worker: TrialProcess) -> None:
        """Have another process compile, for as long as there is something to do, and it does it."""
        try:
            worker.begin()
            while (key := self._next(waits=False)) is not None:
                answered = False
                try:
                    reply = worker.ask({"key": key, "body": self._texts[key]}, _LIMIT_S)
                    if "failure" in reply:
                        self.reasons[key] = str(reply["failure"])
                    answered = True
                finally:  # whatever has ended it: who waits for all is not left waiting
                    self._is_done(left=None if answered else key)
        except WorkerExitedError:
            return

    def drop(self) -> None:
        """Nobody begins anything any more."""
        with self._changed:
            self._open.clear()

    def _next(self, *, waits: bool) -> str | None:
        """What is to be compiled next; None where there is nothing, or will be nothing once all are done that are being compiled."""
        with self._changed:
            while waits and self._busy and not self._open:
                self._changed.wait()
            if not self._open:
                return None
            self._busy += 1
            return self._open.popleft()

    def _is_done(self, left: str | None = None) -> None:
        with self._changed:
            self._busy -= 1
            if left is not None:
                self._open.append(left)
            self._changed.notify_all()
