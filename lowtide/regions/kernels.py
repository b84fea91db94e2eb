"""Inductor's C++ kernels: those of many modules become one library.

    takes   modules that inductor compiles in this thread, while their kernels are gathered
    leaves  a library from which the kernels of all of them are loaded, by what they are written as

Read for one kernel alone, the headers take a compiler ten times as long as the kernel does. So inductor is given a module in a kernel's
place, and writes its own code; what it wrote as kernels is compiled at once, each in a namespace of its own, by inductor's flags. What a
library has not, inductor compiles as it would otherwise.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from lowtide.runtime.libraries import NativeError, is_intact

Alone = Callable[[], ModuleType]  # has inductor compile a kernel

_passing = threading.local()  # `take`: what a thread's kernels come from, from their source and how they are compiled alone
_loaded: dict[str, ModuleType] = {}  # by name: kernels that a library had
_turn = threading.Lock()


class GatheredKernels:
    """The kernels of modules, by name, as inductor has written them."""

    def __init__(self) -> None:
        self.sources: dict[str, str] = {}

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Meanwhile what inductor writes in this thread is added, and not compiled."""

        def take(source: str, alone: Alone) -> ModuleType:
            self.sources[_name(source)] = source
            return _later(_name(source), alone)

        with _taken(take):
            yield

    def compile(self) -> bytes:
        """The library. Raises what inductor raises where it cannot be compiled."""
        from torch._inductor import config
        from torch._inductor.codecache import CppPythonBindingsCodeCache as Kernels

        with config.patch({"cpp_cache_precompile_headers": False}):  # to precompile them takes longer
            path = Kernels.load_async(joint(self.sources), "cpu")().__file__
        return Path(str(path)).read_bytes()


@contextmanager
def from_library(path: Path | None) -> Iterator[None]:
    """Meanwhile kernels that this thread loads come from a library, where it has them."""

    def take(source: str, alone: Alone) -> ModuleType:
        name = _name(source)
        if name not in _loaded and path is not None and is_intact(path):
            load(path, (name,))
        return _loaded.get(name) or alone()

    with _taken(take):
        yield


def load(path: Path, names: Iterable[str]) -> Path:
    """Load those of these kernels that a library has, whose path is given back."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Kernels

    for name in names:
        named: Any = type("NamedKernel", (Kernels,), {"entry_function": name})
        with suppress(ImportError):  # it has no such kernel
            _loaded[name] = named._load_library_inner(str(path), "lowtide_kernels")
    return path


def joint(sources: Mapping[str, str]) -> str:
    """Kernels as one source, with each other's names hidden. Headers come first, so that none is within a namespace."""
    lines = (line for source in sources.values() for line in source.splitlines())
    headers = dict.fromkeys(line for line in lines if line.startswith("#include"))
    parts = [
        f"#define kernel {name}\n#define PyInit_kernel PyInit_{name}\n"
        f"namespace in_{name} {{\n{source}\n}}\n#undef kernel\n#undef PyInit_kernel\n"
        for name, source in sources.items()
    ]
    whole = f"PyMODINIT_FUNC PyInit_kernel(void) {{ return PyInit_{next(iter(sources))}(); }}\n"  # as inductor loads what it has compiled
    first = f"PyMODINIT_FUNC PyInit_{next(iter(sources))}(void);\n"
    return "\n".join((*headers, *parts, first, whole))


def _name(source: str) -> str:
    return f"kernel_{hashlib.sha256(source.encode()).hexdigest()[:24]}"


def _later(name: str, alone: Alone) -> ModuleType:
    """In the place of a kernel that is not compiled yet. Whoever calls it has it from a library, or compiled alone."""
    module, known = ModuleType(name), list[Callable[..., Any]]()

    def kernel(*args: Any) -> Any:
        if not known:
            known.append((_loaded.get(name) or alone()).kernel)
        return known[0](*args)

    vars(module)["kernel"] = kernel
    return module


@contextmanager
def _taken(take: Callable[[str, Alone], ModuleType]) -> Iterator[None]:
    """Meanwhile this thread's kernels are what `take` gives."""
    _pass_here()
    before = getattr(_passing, "take", None)
    _passing.take = take
    try:
        yield
    finally:
        _passing.take = before


def _pass_here() -> None:
    """Have all kernels that inductor compiles, or loads, ask their thread first; once."""
    try:
        from torch._inductor.codecache import CppPythonBindingsCodeCache as Kernels
    except ImportError as error:
        raise NativeError(f"inductor has no kernels in C++ ({error})") from error
    with _turn:
        plain = Kernels.load_async.__func__  # type: ignore[attr-defined]
        if plain.__module__ == __name__:
            return

        def load_async(cls: Any, source: str, *args: Any, **kwargs: Any) -> Any:
            take = getattr(_passing, "take", None)
            if take is None or cls is not Kernels or kwargs.get("optimized_code"):
                return plain(cls, source, *args, **kwargs)
            module = take(source, lambda: plain(cls, source, *args, **kwargs)())
            return lambda: module

        Kernels.load_async = classmethod(load_async)  # type: ignore[assignment]
