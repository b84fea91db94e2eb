"""Runs the system's C++ compiler: with a limit to its time, and whatever it says.

takes   a source, and the name of a library that is to be made of it
leaves  that library, or NativeError, which says why there is none
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

FLAGS = ("-O2", "-std=c++20", "-shared", "-fPIC")
_COMPILERS = ("c++", "g++", "clang++")
_PATIENCE_SECONDS = 300  # for a compiler that takes two
_HEARD_BYTES = 2**16  # of what it says: its first complaint is among them


class NativeError(Exception):
    """Why there is no such library here, in words that go on after "runs without an arena: "."""


def compile_library(source: Path, target: Path, options: Sequence[str] = FLAGS, linked: Sequence[str] = ()) -> None:
    """Make the library `target`. Raises NativeError."""
    command = [*compiler(), *options, str(source), "-o", str(target), *linked]
    try:
        status, said = _run(command, target.parent)
    except subprocess.TimeoutExpired as error:
        raise NativeError(f"the compiler {command[0]} was stopped after {error.timeout:g} seconds") from error
    except OSError as error:
        raise NativeError(f"the compiler {command[0]} does not run ({error})") from error
    if status:
        complaints = [line for line in said.splitlines() if "error" in line] or said.splitlines() or ["without a word"]
        raise NativeError(f"the compiler {command[0]} failed ({complaints[0].strip()}): it has to know C++20, as GCC 10 and Clang 11 do")
    if not target.is_file() or not target.stat().st_size:
        raise NativeError(f"the compiler {command[0]} left no library: is it a C++ compiler?")


def _run(command: Sequence[str], folder: Path) -> tuple[int, str]:
    """The exit status of a program, which has `folder` for its own files, and the beginning of what it says.

    Nothing of a program that is ended here runs on.
    """
    with tempfile.TemporaryFile(dir=folder) as said:
        # A group of its own, so that all of it can be ended; what it says goes to a file, as a pipe is open for as long as any of it lives.
        environment = {**os.environ, "TMPDIR": str(folder)}
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True)
        try:
            status = process.wait(_PATIENCE_SECONDS)
        except BaseException:  # its time is over, or this process is interrupted
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        said.seek(0)
        return status, said.read(_HEARD_BYTES).decode(errors="replace")


def compiler() -> list[str]:
    """$CXX with its options, or the first compiler that is there. Raises NativeError."""
    chosen = os.environ.get("CXX", "")
    try:
        if words := shlex.split(chosen):
            return words
    except ValueError as error:
        raise NativeError(f"CXX is {chosen!r}, which is no command ({error}): correct it, or unset it") from error
    found = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        raise NativeError("it takes a C++ compiler, and none of c++, g++, clang++ is here: install g++, or set CXX")
    return [found]
