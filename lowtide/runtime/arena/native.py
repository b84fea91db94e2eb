"""Builds the planned allocator with the system's compiler, once for each version of torch, and loads it.

    takes   a folder for what can be made again, or None
    leaves  a library that ctypes has loaded, or NativeError, which says why there is none

The library lies in a folder that only its user may write to; where there can be none, it is built for this process alone. A file is put
there as a whole or not at all, so that processes that build at once do not disturb each other, and only once it has been loaded and tried.
Nothing is loaded that somebody else may have written, and what does not load any more is built again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import stat
import struct
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lowtide.base.folders import own_folder, warn_if_not_cached, warn_not_cached
from lowtide.runtime.arena.compiler import FLAGS, NativeError, compile_library

__all__ = ["NativeError", "load"]

_SOURCE = Path(__file__).with_name("allocator.cpp")
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_SEAL_BYTES = hashlib.sha256().digest_size
_NEEDED_BYTES = 2**22  # of disk to build it: forty times the library

_loaded: list[Any] = []  # at most one: a second planned allocator would stand before the first
_loading = threading.Lock()


def load(directory: Path | None) -> Any:
    """This process's library, built where there is none yet below `directory`. Raises NativeError."""
    with _loading:
        if not _loaded:
            _loaded.append(_library(directory))
        return _loaded[0]


def _library(directory: Path | None) -> Any:
    if sys.platform != "linux":
        raise NativeError(f"the planned allocator is made for Linux, this is {platform.system()}")
    name = f"allocator-{_key()}.so"
    try:
        folder = _folder(directory)
        return _built_before(folder / name) or _build(folder, name) if folder is not None else _build(None, name)
    except OSError as error:
        raise NativeError(f"it cannot be built ({error})") from error


def _key() -> str:
    """All that the library depends on; not the compiler that happens to be first, which may be gone once it has done its work."""
    chosen = os.environ.get("CXX", "")
    circumstances = (
        torch.__version__, torch.version.git_version, str(torch.compiled_with_cxx11_abi()), platform.machine(), *platform.libc_ver(),
        chosen, _processor() if chosen else "", *FLAGS,
    )  # fmt: skip
    return hashlib.sha256(_SOURCE.read_bytes() + "\0".join(circumstances).encode(errors="surrogateescape")).hexdigest()[:16]


def _processor() -> str:
    """What this machine's processor can do: options such as -march=native make code for no other, and homes are shared."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return ""


def _folder(directory: Path | None) -> Path | None:
    """The folder, made where it is missing; None, with a warning, where there is none that is safe."""
    warn_if_not_cached()
    try:
        return None if directory is None else own_folder(directory / "native")
    except OSError as error:
        warn_not_cached(error)
        return None


def _built_before(path: Path) -> Any:
    """The library that was built before; None where there is none that loads, and then nothing is in its place."""
    if not _is_own(path):
        return None
    try:
        if _is_sealed(path):
            return _opened(path)
    except NativeError:
        pass
    with suppress(OSError):
        path.unlink()
    return None


def _is_own(path: Path) -> bool:
    """Whether this is a file that nobody else can have written."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_MAY_WRITE


def _is_sealed(path: Path) -> bool:
    """Whether a library ends with its seal: loading one that is cut off would kill the process."""
    written = path.read_bytes()
    return written.endswith(_seal(written[:-_SEAL_BYTES]))


def _seal(library: bytes) -> bytes:
    """What is put behind a library, where loaders do not look."""
    return hashlib.sha256(library).digest()


def _build(folder: Path | None, name: str) -> Any:
    """Compile to a file elsewhere, load and try it, then put it in its place, if there is one."""
    if folder is not None and not _can_build_in(folder):
        warn_not_cached(f"{folder} has no room for the planned allocator, or does not let it run")
        folder = None
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder, ignore_cleanup_errors=True) as piece:
        made = Path(piece) / name
        compile_library(_SOURCE, made)
        _check_is_whole(made.read_bytes())
        library = _opened(made)
        if folder is not None:
            _keep(made, folder / name)
        return library


def _can_build_in(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder) as room:
            os.posix_fallocate(room.fileno(), 0, _NEEDED_BYTES)
        return not os.statvfs(folder).f_flag & os.ST_NOEXEC
    except OSError:
        return False


def _keep(made: Path, path: Path) -> None:
    """Seal a copy and put it in its place; what is loaded stays as it is. A failure costs a warning."""
    sealed = made.with_suffix(".sealed")
    try:
        library = made.read_bytes()
        sealed.write_bytes(library + _seal(library))
        sealed.chmod(0o700)
        os.replace(sealed, path)
    except OSError as error:
        warn_not_cached(error)


def _check_is_whole(library: bytes) -> None:
    """Raise NativeError for what is no library of 64 bits, or has not all the bytes that loading it would read."""
    if len(library) < 64 or library[:5] != b"\x7fELF\2":
        raise NativeError("what the compiler left is no library for 64 bits: set CXX to a compiler for this machine")
    (table,), (entry_bytes, entries) = struct.unpack_from("=Q", library, 32), struct.unpack_from("=HH", library, 54)
    ends = [table + entry_bytes * entries]
    if entry_bytes >= 56 and ends[0] <= len(library):
        ends += [sum(struct.unpack_from("=Q16xQ", library, table + entry_bytes * number + 8)) for number in range(entries)]
    if max(ends) > len(library):
        raise NativeError("the library that the compiler left is cut off: is the disk full?")


def _opened(path: Path) -> Any:
    """A library, loaded and tried, with the types of its functions: ctypes takes everything for an int. Raises NativeError."""
    try:
        library = ctypes.CDLL(str(path))
        for name, held, result, *arguments in _FUNCTIONS:
            make = ctypes.PYFUNCTYPE if held else ctypes.CFUNCTYPE
            setattr(library, f"lowtide_{name}", make(result, *arguments)((f"lowtide_{name}", library)))
    except (OSError, AttributeError) as error:
        raise NativeError(f"the library that was built does not load ({error})") from error
    if not _works(library):
        raise NativeError("the library that was built does not do what it should: set CXX to another compiler")
    return library


def _works(library: Any) -> bool:
    """Whether it makes an arena and lets it go."""
    made = ctypes.c_void_p()
    if library.lowtide_region(64, ctypes.byref(made)) or not made.value:
        return False
    fine = library.lowtide_region_base(made) % 64 == 0 and library.lowtide_region_live(made) == 0
    library.lowtide_region_drop(made)
    return bool(fine)


_POINTER, _INTEGER, _STATUS, _OBJECT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.py_object
_FUNCTIONS: tuple[tuple[Any, ...], ...] = (  # name, whether it calls Python back and so holds its lock, result, arguments
    ("install", False, _STATUS),
    ("region", False, _STATUS, _INTEGER, _POINTER),
    ("region_drop", False, None, _POINTER),
    ("region_base", False, _POINTER, _POINTER),
    ("region_live", False, _INTEGER, _POINTER),
    ("script", False, _STATUS, _INTEGER, _POINTER, _POINTER, _POINTER),
    ("script_drop", False, None, _POINTER),
    ("recording", False, _STATUS, _POINTER),
    ("recording_drop", False, None, _POINTER),
    ("recorded", False, _INTEGER, _POINTER),
    ("take", False, None, _POINTER, _POINTER, _POINTER, _POINTER),
    ("serve", True, _OBJECT, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _OBJECT, _OBJECT),
    ("record", True, _OBJECT, _POINTER, _POINTER, _POINTER, _OBJECT, _OBJECT),
    ("aside", True, _OBJECT, _POINTER, _OBJECT),
    ("alone", True, _OBJECT, _POINTER, _POINTER, _OBJECT, _OBJECT),
    ("trim", False, None),
)
