"""Builds the planned allocator with the system's compiler, once for each version of torch, and loads it.

    takes   a folder that measurements are kept in
    leaves  a library that ctypes has loaded, or NativeError, which says why there is none

The library lies in a folder that only its user may write to. A file is put there as a whole or not at all, so that processes that build at
once do not disturb each other, and nothing is loaded that somebody else may have written.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("allocator.cpp")
_FLAGS = ("-O2", "-std=c++20", "-shared", "-fPIC")
_COMPILERS = ("c++", "g++", "clang++")
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_SEAL_BYTES = hashlib.sha256().digest_size
_PATIENCE_S = 300  # for a compiler that takes a second


class NativeError(Exception):
    """Why there is no planned allocator here, in words that go on after "runs without an arena: "."""


_loaded: list[ctypes.CDLL] = []  # at most one: a second planned allocator would stand before the first
_loading = threading.Lock()


def load(directory: Path) -> ctypes.CDLL:
    """This process's library, built where there is none yet below `directory`. Raises NativeError."""
    with _loading:
        if not _loaded:
            _loaded.append(_library(directory))
        return _loaded[0]


def _library(directory: Path) -> ctypes.CDLL:
    if sys.platform != "linux":
        raise NativeError(f"the planned allocator is made for Linux, this is {platform.system()}")
    path = _own_folder(directory / "native") / f"allocator-{_key()}.so"
    if not _is_own(path) or not _is_whole(path):
        _build(path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"the library that was built does not load ({error})") from error


def _key() -> str:
    """All that the library depends on; not the compiler that happens to be first, which may be gone once it has done its work."""
    circumstances = (
        torch.__version__, torch.version.git_version, str(torch.compiled_with_cxx11_abi()), platform.machine(), *platform.libc_ver(),
        os.environ.get("CXX", ""), *_FLAGS,
    )  # fmt: skip
    return hashlib.sha256(_SOURCE.read_bytes() + "\0".join(circumstances).encode()).hexdigest()[:16]


def _own_folder(folder: Path) -> Path:
    """The folder, made where it is missing. What lies in it is thrown away where others could have written it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise NativeError(f"{folder} cannot be made ({error.strerror}): set LOWTIDE_CACHE to a folder that can") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise NativeError(f"{folder} is not this user's own folder: remove it, or set LOWTIDE_CACHE to another place")
    if status.st_mode & _OTHERS_MAY_WRITE:
        folder.chmod(0o700)
        for path in folder.glob("allocator-*"):
            path.unlink(missing_ok=True)
    return folder


def _is_own(path: Path) -> bool:
    """Whether this is a file that nobody else can have written."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_MAY_WRITE


def _is_whole(path: Path) -> bool:
    """Whether a library ends with its seal: loading one that is cut off would kill the process."""
    written = path.read_bytes()
    return written.endswith(_seal(written[:-_SEAL_BYTES]))


def _seal(library: bytes) -> bytes:
    """What is put behind a library, where loaders do not look."""
    return hashlib.sha256(library).digest()


def _build(path: Path) -> None:
    """Compile to a file of another name, then put it in its place."""
    handle, part = tempfile.mkstemp(dir=path.parent, prefix="building-", suffix=".so")
    os.close(handle)
    try:
        _compile(Path(part))
        Path(part).write_bytes((library := Path(part).read_bytes()) + _seal(library))
        os.chmod(part, 0o700)
        os.replace(part, path)
    except OSError as error:
        raise NativeError(f"{path} cannot be written ({error.strerror}): set LOWTIDE_CACHE to a folder that can") from error
    finally:
        Path(part).unlink(missing_ok=True)


def _compile(target: Path) -> None:
    root = Path(torch.__file__).parent
    command = [*_compiler(), *_FLAGS, f"-I{root / 'include'}", str(_SOURCE), "-o", str(target), f"-L{root / 'lib'}", "-lc10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"the compiler {command[0]} does not run ({error})") from error
    if done.returncode:
        complaints = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["without a word"]
        raise NativeError(f"the compiler {command[0]} failed ({complaints[0].strip()}): it has to know C++20, as GCC 10 and Clang 11 do")


def _compiler() -> list[str]:
    """$CXX with its options, or the first compiler that is there. Raises NativeError."""
    if chosen := shlex.split(os.environ.get("CXX", "")):
        return chosen
    found = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        raise NativeError("it takes a C++ compiler, and none of c++, g++, clang++ is here: install g++, or set CXX")
    return [found]
