"""Libraries that the system's compiler builds, kept in the cache.

    takes   a folder for what can be made again, or None; a name that tells all that the library depends on; how it is made and tried
    leaves  what the trial gives, or NativeError, which says why there is no such library

A library lies in a folder that only its user may write to; where there can be none, it is built for this process alone. A file is put
there as a whole or not at all, so that processes that build at once do not disturb each other, and only once it has been loaded and tried.
Nothing is loaded that somebody else may have written, and what does not load any more is built again.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.base.folders import own_folder, warn_if_not_cached, warn_not_cached
from lowtide.runtime.compiler import NativeError

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_SEAL_BYTES = hashlib.sha256().digest_size
_NEEDED_BYTES = 2**22  # of disk to build one: many times the library


@dataclass(frozen=True)
class LibraryRecipe:
    """How a library is made."""

    what: str  # "the planned allocator"
    compiled: Callable[[Path], None]  # writes the file; raises NativeError
    opened: Callable[[Path], Any]  # loads and tries it; raises NativeError
    is_library: bool = True  # for the system's loader


def library(directory: Path | None, name: str, making: LibraryRecipe) -> Any:
    """What was built before below `directory`, or is now. Raises NativeError."""
    try:
        folder = _folder(directory)
        if folder is None:
            return _build(None, name, making)
        return _built_before(folder / name, making) or _build(folder, name, making)
    except OSError as error:
        raise NativeError(f"it cannot be built ({error})") from error


def processor() -> str:
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


def _built_before(path: Path, making: LibraryRecipe) -> Any:
    """The library that was built before; None where there is none that loads, and then nothing is in its place."""
    if not _is_own(path):
        return None
    try:
        if _is_sealed(path):
            return making.opened(path)
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
    return written.endswith(seal(written[:-_SEAL_BYTES]))


def seal(library: bytes) -> bytes:
    """What is put behind a library, where loaders do not look."""
    return hashlib.sha256(library).digest()


def unsealed(written: bytes) -> bytes:
    """What a file holds beside its seal, if it has one."""
    content = written[:-_SEAL_BYTES]
    return content if written.endswith(seal(content)) else written


def _build(folder: Path | None, name: str, making: LibraryRecipe) -> Any:
    """Compile to a file elsewhere, load and try it, then put it in its place, if there is one."""
    if folder is not None and not _can_build_in(folder):
        warn_not_cached(f"{folder} has no room for {making.what}, or does not let it run")
        folder = None
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder, ignore_cleanup_errors=True) as piece:
        made = Path(piece) / name
        making.compiled(made)
        if making.is_library:
            _check_is_whole(made.read_bytes())
        found = making.opened(made)
        if folder is not None:
            _keep(made, folder / name)
        return found


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
        sealed.write_bytes(library + seal(library))
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
