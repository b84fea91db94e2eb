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
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

FLAGS = ("-O2", "-std=c++20", "-shared", "-fPIC")
_COMPILERS = ("c++", "g++", "clang++")
_PATIENCE_SECONDS = 300  # for a compiler that takes two
_HEARD_BYTES = 2**16  # of what it says: its first complaint is among them


class NativeError(Exception):
    """Why there is no such library here, in words that go on after "runs without an arena: "."""


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
    for status, said in answers:
        if status:
            complaints = [line for line in said.splitlines() if "error" in line] or said.splitlines() or ["without a word"]
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
                said = files.enter_context(tempfile.TemporaryFile(dir=folder))
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
                )
                begun.append((process, said))
            return [(process.wait(max(0.0, end - time.monotonic())), _heard(said)) for process, said in begun]
        except BaseException:  # their time is over, or this process is interrupted
            for process, _ in begun:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            raise


def _heard(said: IO[bytes]) -> str:
    said.seek(0)
    return said.read(_HEARD_BYTES).decode(errors="replace")


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
