"""Modules compiled by inductor, and kept as artifacts beside what the system's compiler builds.

    takes   a torch.fx module, what it is given (as descriptions of tensors), a text that says all that it computes
    leaves  a function of the same arguments, or NativeError, which says why there is none

An artifact is taken from lowtide's cache where it was made before, by the same torch for the same machine; inductor keeps what it compiles
of it in a cache of its own.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import fx

from lowtide.base.folders import directory
from lowtide.base.release import VERSION
from lowtide.runtime.libraries import LibraryRecipe, NativeError, library, processor, unsealed

Run = Callable[..., list[Any]]


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
