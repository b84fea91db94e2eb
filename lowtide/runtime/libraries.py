"""Runs the system's C++ compiler, with a limit to its time; and keeps the libraries that it builds in the cache.

    takes   a folder for what can be made again, or None; a name that tells all that the library depends on; how it is made and tried
    leaves  what the trial gives, or NativeError, which says why there is no such library

A library lies in a folder that only its user may write to; where there can be none, it is built for this process alone. A file is put
there as a whole or not at all, so that processes that build at once do not disturb each other, and only once it has been loaded and tried.
Nothing is loaded that somebody else may have written, and what does not load any more is built again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import IO, Any

from lowtide.base.files import own_folder, warn_if_not_cached, warn_not_cached

FLAGS = ("-O2", "-std=c++20", "-shared", "-fPIC")
_COMPILERS = ("c++", "g++", "clang++")
_PATIENCE_SECONDS = 300  # for a compiler that takes two
_HEARD_BYTES = 2**16  # of what it says: its first complaint is among them


class NativeError(Exception):
    """Why there is no such library here, in words that go on after a colon."""


def compile_library(source: Path, target: Path, options: Sequence[str] = FLAGS, linked: Sequence[str] = (), parts: int = 1) -> None:
    """Make the library `target`, in so many parts at once: their source looks at LOWTIDE_PARTS and LOWTIDE_PART. Raises NativeError."""
    command = [*compiler(), *options]
    if parts == 1:
        _run_all([[*command, str(source), "-o", str(target), *linked]], target.parent)
    else:
        objects = [str(target.with_suffix(f".{part}.o")) for part in range(parts)]
        _run_all(
            [
                [*command, "-c", f"-DLOWTIDE_PARTS={parts}", f"-DLOWTIDE_PART={part}", str(source), "-o", each]
                for part, each in enumerate(objects)
            ],
            target.parent,
        )
        _run_all([[*command, *objects, "-o", str(target), *linked]], target.parent)
    if not target.is_file() or not target.stat().st_size:
        raise NativeError(f"the compiler {command[0]} left no library: is it a C++ compiler?")


def _run_all(commands: Sequence[Sequence[str]], folder: Path) -> None:
    """Run compilers beside each other. Raises NativeError where one fails."""
    name = commands[0][0]
    try:
        answers = _answers(commands, folder)
    except subprocess.TimeoutExpired as error:
        raise NativeError(f"the compiler {name} was stopped after {_PATIENCE_SECONDS:g} seconds") from error
    except OSError as error:
        raise NativeError(f"the compiler {name} does not run ({error})") from error
    for status, words in answers:
        if status:
            complaints = [line for line in words.splitlines() if "error" in line] or words.splitlines() or ["without a word"]
            raise NativeError(f"the compiler {name} failed ({complaints[0].strip()}): it has to know C++20, as GCC 10 and Clang 11 do")


def _answers(commands: Sequence[Sequence[str]], folder: Path) -> list[tuple[int, str]]:
    """The exit status of each program, and the beginning of what it says. They have `folder` for their own files.

    Nothing of a program that is ended here runs on.
    """
    environment = {**os.environ, "TMPDIR": str(folder)}
    begun: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
    end = time.monotonic() + _PATIENCE_SECONDS
    with ExitStack() as files:
        try:
            for command in commands:
                # A group of its own, so that all of it can be ended; what it says goes to a file, as a pipe is open for as long as any
                # of it lives.
                output = files.enter_context(tempfile.TemporaryFile(dir=folder))
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
                )
                begun.append((process, output))
            return [(process.wait(max(0.0, end - time.monotonic())), _heard(output)) for process, output in begun]
        except BaseException:  # their time is over, or this process is interrupted
            for process, _ in begun:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            raise


def _heard(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read(_HEARD_BYTES).decode(errors="replace")


def compiler() -> list[str]:
    """$CXX with its options, or the first compiler that is there. Raises NativeError."""
    chosen = os.environ.get("CXX", "")
    try:
        if words := shlex.split(chosen):
            return words
    except ValueError as error:
        raise NativeError(f"CXX is {chosen!r}, which is no command ({error}): correct it, or unset it") from error
    command = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if command is None:
        raise NativeError("it takes a C++ compiler, and none of c++, g++, clang++ is here: install g++, or set CXX")
    return [command]


_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_SEAL_BYTES = hashlib.sha256().digest_size
_NEEDED_BYTES = 2**22  # of disk to build one: many times the library


@dataclass(frozen=True)
class LibraryRecipe:
    what: str  # "the planned allocator"
    compiled: Callable[[Path], None]  # writes the file; raises NativeError
    opened: Callable[[Path], Any]  # loads and tries it; raises NativeError
    is_library: bool = True  # for the system's loader


def once(load: Callable[[Path | None], Any]) -> Callable[[Path | None], Any]:
    """The function, which gives one library for good: a second would stand before the first. It is called again where it has raised."""
    loaded, turn = list[Any](), threading.Lock()

    @wraps(load)
    def of_process(directory: Path | None) -> Any:
        with turn:
            if not loaded:
                loaded.append(load(directory))
            return loaded[0]

    return of_process


def library(directory: Path | None, name: str, recipe: LibraryRecipe) -> Any:
    """What was built before below `directory`, or is now. Raises NativeError."""
    try:
        folder = _folder(directory)
        if folder is None:
            return _build(None, name, recipe)
        return _built_before(folder / name, recipe) or _build(folder, name, recipe)
    except OSError as error:
        raise NativeError(f"it cannot be built ({error})") from error


@contextmanager
def loaded(path: Path, kind: type[ctypes.CDLL] = ctypes.CDLL) -> Iterator[Any]:
    """A library for ctypes, in here. Raises NativeError where it does not load, or has not what is looked for in it."""
    try:
        yield kind(str(path))
    except (OSError, AttributeError) as error:
        raise NativeError(f"the library that was built does not load ({error})") from error


def machine() -> tuple[str, str, str]:
    """What the time of generated code depends on beside its source: the machine, its processor, the compiler that is asked for."""
    return platform.machine(), hashlib.sha256(processor().encode()).hexdigest(), os.environ.get("CXX", "")


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


def _built_before(path: Path, recipe: LibraryRecipe) -> Any:
    """The library that was built before; None where there is none that loads, and then nothing is in its place."""
    if not _is_own(path):
        return None
    with suppress(NativeError):
        if _is_sealed(path):
            return recipe.opened(path)
    with suppress(OSError):
        path.unlink()
    return None


def is_intact(path: Path) -> bool:
    """Whether a library lies there that this user has built, and all of it."""
    return _is_own(path) and _is_sealed(path)


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


def _build(folder: Path | None, name: str, recipe: LibraryRecipe) -> Any:
    """Compile to a file elsewhere, load and try it, then put it in its place, if there is one."""
    if folder is not None and not _can_build_in(folder):
        warn_not_cached(f"{folder} has no room for {recipe.what}, or does not let it run")
        folder = None
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder, ignore_cleanup_errors=True) as piece:
        draft = Path(piece) / name
        recipe.compiled(draft)
        if recipe.is_library:
            _check_is_whole(draft.read_bytes())
        library = recipe.opened(draft)
        if folder is not None:
            _keep(draft, folder / name)
        return library


def _can_build_in(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder) as room:
            os.posix_fallocate(room.fileno(), 0, _NEEDED_BYTES)
        return not os.statvfs(folder).f_flag & os.ST_NOEXEC
    except OSError:
        return False


def _keep(draft: Path, path: Path) -> None:
    """Seal a copy and put it in its place; what is loaded stays as it is. A failure costs a warning."""
    sealed = draft.with_suffix(".sealed")
    try:
        library = draft.read_bytes()
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
