"""Modules compiled by inductor, kept as artifacts beside what the system's compiler builds; several beside one another.

    takes   a torch.fx module, what it is given (as descriptions of tensors), a text that says all that it computes
    leaves  a function of the same arguments, or NativeError, which says why there is none

An artifact is taken from lowtide's cache where it was made before, by the same torch for the same machine. It names the library beside it
that has its kernels; without one, inductor compiles them, and keeps them in a cache of its own.

Several bodies are compiled in this process and in some of their own. Inductor's Python takes most of the time and is not made for threads,
so that each process takes a body at a time, and in the end compiles the kernels of all that it took as one library. Of processes there are
as many as torch's own setting allows (TORCHINDUCTOR_COMPILE_THREADS), and no more than pay for importing torch. One that cannot be had, or
that ends before it has answered, leaves its bodies to this one.

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
from lowtide.regions.kernels import GatheredKernels, from_library, load
from lowtide.runtime.libraries import LibraryRecipe, NativeError, library, processor, unsealed

Run = Callable[..., list[Any]]
_MODULE = "lowtide.regions.compilation"
_LIMIT_S = 300.0  # for one body
_BODIES = 4  # for which it pays to start a process
_MOST = 8  # processes: each takes some 400 MiB

_CANNOT = "inductor cannot compile it"

_begun: list[TrialProcess] = []  # at most one, which begins while its bodies are not known yet


class TensorSpec(NamedTuple):
    """A tensor that a module is given; a number is one of no dimensions."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str


def begin() -> None:
    """Import inductor, which takes a second; whoever compiles is told what is wrong with it."""
    with suppress(Exception), _quiet():
        import_module("torch._inductor.compile_fx")


def warm_up() -> None:
    """Compile next to nothing: inductor reads its patterns once, and asks the compiler once what the processor can do, for seconds."""
    begin()
    with suppress(NativeError):
        group = ModuleGroup(lambda _: (lambda: fx.symbolic_trace(lambda x: (x.relu(),)), [TensorSpec((1,), (1,), "float32", "cpu")]))
        group.take("")


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


def compiled(text: str, module: Callable[[], fx.GraphModule], specs: Sequence[TensorSpec]) -> Run:
    """What runs a module. Raises NativeError."""
    run: Run = library(directory(), _name(text), _recipe(partial(_compile, module, specs), _opened))
    return run


def _recipe(written: Callable[[Path], None], opened: Callable[[Path], Any]) -> LibraryRecipe:
    return LibraryRecipe("what inductor compiles", written, opened, is_library=False)


class ModuleGroup:
    """Modules that `compiled` is to find by their texts: compiled one after the other, and their kernels as one library."""

    def __init__(self, of: Callable[[str], tuple[Callable[[], fx.GraphModule], Sequence[TensorSpec]]]) -> None:
        self._of, self._kernels = of, GatheredKernels()
        self._artifacts: dict[str, Any] = {}
        self._reasons: dict[str, str] = {}

    def take(self, text: str) -> None:
        try:
            with _as_native_errors(_CANNOT), self._kernels.gathering(), _for_this_processor():
                self._artifacts[text] = _artifact(*self._of(text))
        except NativeError as error:
            self._reasons[text] = str(error)

    def finish(self) -> dict[str, str]:
        """Compile the kernels; by text, why there is nothing."""
        name = _name("\0".join(self._artifacts), "so")
        try:
            if self._kernels.sources:
                library(directory(), name, _recipe(self._write, self._load))
            for text, artifact in self._artifacts.items():
                library(directory(), _name(text), _recipe(partial(_save, artifact, name), lambda path: path))
        except NativeError:  # a compiler that cannot do what the processor can, or a kernel that cannot be beside others
            for text in self._artifacts:
                try:
                    compiled(text, *self._of(text))
                except NativeError as error:
                    self._reasons[text] = str(error)
        return self._reasons

    def _write(self, path: Path) -> None:
        with _as_native_errors(_CANNOT), _for_this_processor():
            path.write_bytes(self._kernels.compile())

    def _load(self, path: Path) -> Path:
        with _as_native_errors("what inductor has compiled does not load"):
            return load(path, self._kernels.sources)


@contextmanager
def _for_this_processor() -> Iterator[None]:
    """Inductor takes what the processor says that it can do, and does not try for seconds whether the compiler knows of it."""
    from torch._inductor import config

    with config.patch({"cpp.vec_isa_ok": True} if config.cpp.vec_isa_ok is None else {}):
        yield


@lru_cache(1024)
def number(value: float) -> torch.Tensor:
    """A number as modules take it. Nobody writes it; most are the same from step to step, or for all parameters of one."""
    return torch.from_numpy(numpy.array(value, numpy.float64))  # as numbers are, outside of the memory that is planned


def circumstances(device: str) -> str:
    """All that what is compiled depends on beside what it computes."""
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
    where = (platform.machine(), processor(), os.environ.get("CXX", ""), str(torch.get_num_threads()), gpu)
    return "\0".join((torch.__version__, VERSION, *where))


def _name(text: str, ending: str = "bin") -> str:
    return f"inductor-{hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()[:24]}.{ending}"


def _compile(module: Callable[[], fx.GraphModule], specs: Sequence[TensorSpec], path: Path) -> None:
    with _as_native_errors(_CANNOT):
        _save(_artifact(module, specs), "", path)


def _artifact(module: Callable[[], fx.GraphModule], specs: Sequence[TensorSpec]) -> Any:
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
        return standalone_compile(graph, fakes, **_told_of(mode, fakes, graph, standalone_compile))


def _save(artifact: Any, kernels: str, path: Path) -> None:
    """An artifact, after a line that names the library of its kernels."""
    with _as_native_errors(_CANNOT):
        artifact.save(path=str(path), format="binary")
        path.write_bytes(kernels.encode() + b"\n" + path.read_bytes())


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

        kernels, _, artifact = unsealed(path.read_bytes()).partition(b"\n")
        file.write(artifact)
        file.flush()
        with from_library(path.with_name(kernels.decode()) if kernels else None):
            run: Run = CompiledArtifact.load(path=file.name, format="binary")
    return run


@contextmanager
def _as_native_errors(what: str) -> Iterator[None]:
    """Its warnings are its own; whatever it, its compilers and the disk raise, assertions about another torch's artifact too, is told."""
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
    """Meanwhile what needs no body goes on: inductor is imported here, and in a process that compiles."""
    if device != "cpu":
        yield
        return
    begin()
    if not has_compiled() and processes() > 1 and not _begun:
        with suppress(WorkerExitedError):
            _begun.append(_started())
    try:
        yield
    finally:
        while _begun:
            _begun.pop().end()


def compile_all(texts: Mapping[str, str], here: Callable[[], ModuleGroup], say: Callable[[float], object]) -> dict[str, str]:
    """Have bodies compiled, by `here` in this process; for those that could not be, why."""
    jobs = _Jobs(texts)
    workers: list[TrialProcess] = []
    try:
        for _ in range(min(processes(), _MOST, -(-len(texts) // _BODIES)) - 1):
            with suppress(WorkerExitedError):
                workers.append(_begun.pop() if _begun else _started())
                threading.Thread(target=jobs.feed, args=(workers[-1],), name="lowtide-compiles", daemon=True).start()
        jobs.work(here, say)
    finally:
        jobs.drop()
        for worker in workers:
            worker.end()
    return jobs.reasons


def _started() -> TrialProcess:
    return TrialProcess({"limit_s": _LIMIT_S, "threads": torch.get_num_threads()}, _MODULE, waits=False)


class _Jobs:
    """Bodies that nobody compiles yet, and what became of the others."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.reasons: dict[str, str] = {}
        self._texts, self._open, self._elsewhere = texts, deque(texts), 0
        self._changed = threading.Condition()

    def work(self, here: Callable[[], ModuleGroup], say: Callable[[float], object]) -> None:
        """Compile in this process, until all is done, here or elsewhere."""
        while self._is_left():
            group = here()
            while (key := self._next()) is not None:
                group.take(key)
                say(1 - (len(self._open) + 1) / (len(self._texts) + 1))
            self.reasons |= group.finish()
        say(1.0)

    def feed(self, worker: TrialProcess) -> None:
        """Have another process compile, for as long as there is something to do, and it does it."""
        taken = list[str]()
        try:
            worker.begin()
            while (key := self._next(taken)) is not None:
                worker.ask({"key": key, "body": self._texts[key]}, _LIMIT_S)
            self.reasons |= worker.ask({"finish": True}, _LIMIT_S)["reasons"] if taken else {}
            self._has_done(taken, left=())
        except WorkerExitedError:
            return
        finally:  # whatever has ended it: nobody who waits for all is left waiting
            self._has_done(taken, left=taken)

    def drop(self) -> None:
        """Nobody begins anything any more."""
        with self._changed:
            self._open.clear()

    def _is_left(self) -> bool:
        """Whether anything is to be compiled here, once all is done that is being compiled elsewhere."""
        with self._changed:
            while self._elsewhere and not self._open:
                self._changed.wait()
            return bool(self._open)

    def _next(self, elsewhere: list[str] | None = None) -> str | None:
        """What is to be compiled next; None where there is nothing. It is added to what is taken `elsewhere`."""
        with self._changed:
            if not self._open:
                return None
            key = self._open.popleft()
            if elsewhere is not None:
                elsewhere.append(key)
                self._elsewhere += 1
            return key

    def _has_done(self, taken: list[str], left: Sequence[str]) -> None:
        with self._changed:
            self._elsewhere -= len(taken)
            self._open.extend(left)
            taken.clear()
            self._changed.notify_all()
