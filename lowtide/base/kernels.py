"""`@kernel`: a function that numba compiles at its first call, kept on disk for the next process where that can be had, and linked once.

numba's own cache refuses to start where no folder can be written, and raises what a damaged or full disk gives it. This one treats all that
is missing, damaged or full as nothing, with one warning where the user can do something about it: the kernel is compiled anew. A file is
read only as it was written, by its seal. It is found by all that it was made of: the code of the kernel and of those that it calls, what
they read of their modules, types, processor and versions. A wheel brings kernels of its own (`built`), compiled for any processor of the
kind: searches are as fast by these, and the first step waits for no compiler.

What only kernels call is optimised and turned into machine code within those that Python calls. numba does both for each function with all
that it calls, and again within every caller, up to the top: most of what it took was for code that nothing jumped to. What a kernel calls
keeps its code as it was written, and is known to the kernel alone, so that nothing else is made of it.

numba's private names are used here, and nowhere else.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, NoReturn, TypeVar, overload

import numba
import numpy as np
from llvmlite import binding
from numba.core import codegen, compiler, compiler_lock, config, registry, serialize
from numba.core.environment import lookup_environment

from lowtide.base.files import directory, own_folder, read_bytes, warn_if_not_cached, warn_not_cached, write_whole

# Of numba's private names only those of these versions are known. With any other kernels are linked as numba links them: in more time.
KNOWN = ("0.68.",)

_Library: Any = codegen.JITCodeLibrary  # numba has no types
_environment_of: Any = lookup_environment
Function = TypeVar("Function", bound=Callable[..., Any])

_SEAL_BYTES = hashlib.sha256().digest_size
_CompileResult: Any = compiler.CompileResult  # these have no types
_dumps: Any = serialize.dumps
_config: Any = config
COMPILING: Any = compiler_lock.global_compiler_lock  # held while numba compiles, on whichever thread
_Dispatcher: Any = registry.CPUDispatcher
SWITCHED_OFF = bool(_config.DISABLE_JIT)  # by NUMBA_DISABLE_JIT=1: kernels are Python, which a debugger steps through
_STARRED = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
# Kernels that a wheel brings for this numba, and for which processor of each kind: the least of those on which torch runs.
BUILT = Path(__file__).absolute().parents[1] / "built" / numba.__version__
BASELINES = {"x86_64": "x86-64-v2", "AMD64": "x86-64-v2", "aarch64": "generic", "arm64": "apple-m1"}
_NEEDS = ("sse4.2", "ssse3", "popcnt")  # of x86-64-v2, beside what each x86-64 has
_PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None), np.generic)


@contextmanager
def linked_once(target: Any) -> Iterator[None]:
    """What is compiled meanwhile for a target is linked where Python calls it. Whoever asks holds numba's lock."""
    if not numba.__version__.startswith(KNOWN):
        yield
        return
    target.refresh()  # its own libraries are not ours
    generator = target.codegen()
    before = generator._library_class
    generator._library_class = _LinkedOnce
    try:
        yield
    finally:
        generator._library_class = before


class _NoCode:
    """Stands for the generator of code where none is generated: there is no place to keep what raises exceptions."""

    def set_env(self, *_: Any) -> None:
        pass


class _LinkedOnce(_Library):  # type: ignore[misc]
    """A library that has machine code only once there is something in it for Python to call, and somebody asks for that."""

    _written: Any = None  # the code as it was written, until all is linked; None where it was read from disk
    _to_link: Any = None  # the same, as callers take it

    def finalize(self) -> None:
        self._raise_if_finalized()
        self._finalize_dynamic_globals()
        self._written = self._final_module
        self._finalized = True

    @property
    def codegen(self) -> Any:
        return self._codegen if self._written is None else _NoCode()

    def get_pointer_to_function(self, name: str) -> Any:
        self._ensure_finalized()
        if self._written is not None:
            if not any(each.name == name for each in self.get_defined_functions()):
                return 0
            self._link()
        return super().get_pointer_to_function(name)

    def _get_module_for_linking(self) -> Any:
        """For libraries of numba's own kind, which do not ask what else is called."""
        self._ensure_finalized()
        if self._written is not None:
            self._link()
        return super()._get_module_for_linking()

    def _link(self) -> None:
        self._alone()
        linked, self._written = self._written, None
        for library in reversed(self._called({})):  # callers first: of the others only what is called already is linked
            self._reload_init.update(library._reload_init)
            linked.link_in(library._alone() if isinstance(library, _LinkedOnce) else library._get_module_for_linking(), preserve=True)
        for each in linked.functions:
            if not each.is_declaration and each.linkage.name == "linkonce_odr":
                each.linkage = "internal"
        self._dynamic_globals.clear()  # found again, with those of all that is called
        self._optimize_final_module()
        linked.verify()
        self._finalize_final_module()
        for name in [each.name for each in linked.global_variables]:
            if (environment := _environment_of(name)) is not None:
                self._codegen.set_env(name, environment)

    def _called(self, needed: dict[Any, None]) -> dict[Any, None]:
        """All libraries that this one needs, each once and after those that it needs itself."""
        for library in self._linking_libraries:
            if library is not self and library not in needed:
                if isinstance(library, _LinkedOnce):
                    library._called(needed)
                needed[library] = None
        return needed

    def _alone(self) -> Any:
        """The code without what it calls, as callers may take it: each has its own."""
        if self._to_link is None and self._written is not None:
            self._to_link = self._written.clone()
            for each in self._to_link.functions:
                if not each.is_declaration and each.linkage.name == "external":
                    each.linkage = "linkonce_odr"
        return self._get_module_for_linking() if self._to_link is None else self._to_link


@overload
def kernel(function: Function) -> Function: ...


@overload
def kernel(*, nogil: bool = False, inner: bool = False, borrows: bool = False) -> Callable[[Function], Function]: ...


def kernel(function: Any = None, *, nogil: bool = False, inner: bool = False, borrows: bool = False) -> Any:
    """Compile a function by numba, and keep what was compiled. `nogil`: other threads run on while it does.

    `inner`: only other kernels call it. It becomes machine code within those and is kept with them. Called from Python it raises
    TypeError.
    `borrows`: it makes no arrays, and those that it is given outlive the call. It counts no references, which in a short kernel can take
    more time than the rest, and takes half the time to compile. One that does make an array fails to compile.
    """
    settings = _Settings(nogil, inner, borrows)
    if function is None:
        return lambda function: _compiled(function, settings)
    return _compiled(function, settings)


class _Settings(NamedTuple):
    nogil: bool = False
    inner: bool = False
    borrows: bool = False

    @property
    def for_numba(self) -> dict[str, bool]:
        return {"nogil": self.nogil, "no_cfunc_wrapper": True, "no_cpython_wrapper": self.inner, "_nrt": not self.borrows}


def _compiled(function: Any, settings: _Settings) -> Any:
    options: Any = settings.for_numba  # not all are among its types
    compiled: Any = numba.njit(**options)(function)
    if compiled is function:  # as it is where numba is switched off
        return function
    if not settings.inner:
        compiled._cache = KernelCache(function, settings)
    compiled.__class__ = _Inner if settings.inner else _Kernel
    return compiled


class _AnyKernel(_Dispatcher):  # type: ignore[misc]  # numba has no types
    def compile(self, sig: Any) -> Any:
        with COMPILING, linked_once(self.targetctx):
            return super().compile(sig)


class _Kernel(_AnyKernel):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """An interrupt that comes meanwhile is raised where numba makes Python's objects of the results, which passes it over."""
        try:
            return super().__call__(*args, **kwargs)
        except SystemError as error:
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise


class _Inner(_AnyKernel):
    """A kernel that has nothing by which Python could call it: numba would jump to address 0."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"expected {self.__name__} to be called by kernels only, got a call from Python: take `inner` off it")


def is_at_hand(compiled: Any) -> bool:
    """Whether a kernel need not be compiled at its first call: an earlier process kept it, or numba is switched off."""
    cache = getattr(compiled, "_cache", None)
    return cache is None or bool(compiled.signatures) or cache.has_any()


def can_be_cached() -> bool:
    """Whether other processes will find what is compiled now."""
    return any(_takes_files(folder) for folder in _folders(Path(__file__).absolute(), to_write=True))


class KernelCache:
    """What was compiled of one function, in the place of numba's own cache."""

    def __init__(self, function: FunctionType, settings: _Settings) -> None:
        self._function = function
        self._settings = settings
        self._file = Path(inspect.getfile(function)).absolute()

    @property
    def cache_path(self) -> str | None:
        return next(map(str, _folders(self._file)), None)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was compiled for these types; None where there is nothing that can be used."""
        target_context.refresh()
        source, codegen = self._stem() + self._made_of(), target_context.codegen()
        paths = [folder / (source + _suffix(sig, codegen.magic_tuple())) for folder in _folders(self._file)]
        payloads = (_unsealed(path) for path in (*paths, *_built(source, sig, codegen)))
        payload = next((each for each in payloads if each is not None), None)
        try:
            return None if payload is None else _CompileResult._rebuild(target_context, *pickle.loads(payload))
        except Exception:  # of all that numba may say of a file that another made: what it cannot use is compiled anew
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled, in the first folder that takes it."""
        if data.lifted or data.library.has_dynamic_globals:
            return
        payload, name = _dumps(data._reduce()), self._made_of() + _suffix(sig, data.codegen.magic_tuple())
        why: OSError | str = "there is no folder for compiled kernels"
        for folder in _folders(self._file, to_write=True):
            try:
                _write(folder, self._stem(), name, payload)
                return
            except OSError as error:
                why = error
        warn_not_cached(why)

    def has_any(self) -> bool:
        """Whether something is kept that was compiled of these sources, for whatever types and processor."""
        begin = self._stem() + self._made_of()
        return any(name.startswith(begin) for folder in (*_folders(self._file), BUILT) for name in _names_in(folder))

    def flush(self) -> None:
        """Forget everything that was kept of this function."""
        for folder in _folders(self._file):
            _remove(folder, self._stem())

    def _stem(self) -> str:
        return f"{self._file.stem}.{self._function.__qualname__}.{sys.implementation.cache_tag}-"

    def _made_of(self) -> str:
        return _short("\n".join([repr(self._settings), *_sources(self._function, set())]))


def _suffix(sig: Any, target: tuple[str, str, str]) -> str:
    """The end of a file's name, after what the sources are: by types, by triple, processor and features of the target, by versions."""
    types = [(str(each), getattr(each, "fields", ())) for each in sig]
    return f"-{_short(repr((types, target, numba.__version__, np.__version__.partition('.')[0])))}.nbc"


def _built(source: str, sig: Any, codegen: Any) -> Iterator[Path]:
    """What the wheel brings, where this processor runs it and nobody has named another one."""
    baseline = BASELINES.get(platform.machine())
    features = binding.get_host_cpu_features()
    if baseline is not None and _config.CPU_NAME is None and (baseline != "x86-64-v2" or all(features.get(each) for each in _NEEDS)):
        yield BUILT / (source + _suffix(sig, (codegen.magic_tuple()[0], baseline, "")))


def _names_in(folder: Path) -> list[str]:
    with suppress(OSError):
        return os.listdir(folder)
    return []


def _takes_files(folder: Path) -> bool:
    """Whether files can be written to a folder, or to the nearest one above it that there is."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


def _folders(file: Path, to_write: bool = False) -> Iterator[Path]:
    """Where code of this source file is kept, in this order: beside it, as Python keeps its own; in lowtide's folder."""
    if _config.CACHE_DIR:
        yield Path(_config.CACHE_DIR) / f"{file.parent.name}-{_short(str(file.parent))}"
        return
    yield file.parent / "__pycache__"
    if (own := _own_folder(to_write)) is not None:
        yield own / f"{file.parent.name}-{_short(str(file.parent))}"


@cache
def _own_folder(to_write: bool) -> Path | None:
    """lowtide's folder for kernels, where nobody else can have put anything: made where something is to be written."""
    if to_write:
        warn_if_not_cached()
    if (folder := directory()) is None or not (to_write or (folder / "kernels").exists()):
        return None
    with suppress(OSError):
        return own_folder(folder / "kernels")
    return None


def _unsealed(path: Path) -> bytes | None:
    """What `_write` wrote; None where there is no such file, or none that can be read whole."""
    try:
        written = read_bytes(path, regular=True)
    except OSError:
        return None
    payload = written[_SEAL_BYTES:]
    return payload if written[:_SEAL_BYTES] == hashlib.sha256(payload).digest() else None


def _write(folder: Path, stem: str, name: str, payload: bytes) -> None:
    """Put a file where `_unsealed` finds it, in the place of those of former sources. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    _remove(folder, stem, besides=name.split("-")[0])
    write_whole(folder / (stem + name), hashlib.sha256(payload).digest() + payload, regular=True)


def _remove(folder: Path, stem: str, besides: str = " ") -> None:
    with suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(stem) and not name.startswith(stem + besides):
                (folder / name).unlink()


def _sources(function: FunctionType, seen: set[FunctionType]) -> Iterator[str]:
    """All that a kernel is made of, in lines: its code and that of the kernels it calls, and what they read of their modules."""
    if function in seen:
        return
    seen.add(function)
    yield f"{function.__qualname__} {function.__defaults__} {function.__kwdefaults__}"
    yield from _texts(function.__code__)
    enclosed = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for name in (*_names(function.__code__), *enclosed):
        if name in enclosed:
            yield from _source_of(name, enclosed[name].cell_contents, function, seen)
        elif name in function.__globals__:
            yield from _source_of(name, function.__globals__[name], function, seen)


def _source_of(name: str, item: Any, function: FunctionType, seen: set[FunctionType]) -> Iterator[str]:
    called = getattr(item, "py_func", item)
    if isinstance(called, FunctionType):
        yield from _sources(called, seen)
    elif isinstance(item, np.ndarray):
        yield f"{name} = {item.dtype} {item.shape} {hashlib.sha256(item.tobytes()).hexdigest()}"
    elif isinstance(item, ModuleType) and item.__name__.partition(".")[0] == function.__module__.partition(".")[0]:
        for each in _names(function.__code__):
            if hasattr(item, each):
                yield from _source_of(f"{name}.{each}", getattr(item, each), function, seen)
    elif isinstance(item, _PLAIN):
        yield f"{name} = {item!r}"
    else:
        yield f"{name} {getattr(item, '_fields', '')}"


def _names(code: CodeType) -> Iterator[str]:
    """The names of modules' variables and of attributes that a function's code speaks of, with those of functions within it."""
    yield from code.co_names
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield from _names(item)


def _texts(code: CodeType) -> Iterator[str]:
    """A function's code, with that of functions within it, without the places where it is written."""
    starred = code.co_flags & _STARRED  # other flags have been seen to change while a profiler runs, and say nothing that the code does not
    yield repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_argcount, starred))
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield from _texts(item)
        else:
            yield repr(sorted(map(repr, item)) if isinstance(item, frozenset) else item)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
