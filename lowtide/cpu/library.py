"""The team of threads and the networks that it runs, built by the system's compiler for the machine at hand, once, and kept."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import threading
from functools import cache, partial
from pathlib import Path
from typing import Any

from lowtide.base.folders import directory
from lowtide.base.workers import processors
from lowtide.cpu.recipes import Target
from lowtide.errors import there
from lowtide.runtime.libraries import LibraryRecipe, NativeError, compile_library, library, processor

ENTRY = "lowtide_network"
_HERE = Path(__file__).parent
_TEAM = _HERE / "team.cpp"
_TEMPLATES = ("kernels.hpp", "blocks.hpp", "attention.hpp", "winograd.hpp")
SOURCES = (_TEAM, *(_HERE / name for name in _TEMPLATES))  # that decide what a kernel takes
_NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
# NaN and infinities are as in IEEE 754; only that nobody looks at errno or at traps is taken for granted.
FLAGS = ("-O3", "-std=c++20", _NATIVE, "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-pthread", f"-I{_HERE}")
_PART_LETTERS = 6000  # of source, for which a compiler takes longer than to read the templates
_lock = threading.Lock()


class Experience(ctypes.Structure):
    """What runs of one network took so far, as team.cpp has it: whether several threads pay."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("count", "together", "spent_ns", "alone", "alone_ns", "lost_ns", "pause_ns", "until_ns")
    )


class Team:
    """Runs networks."""

    def __init__(self, loaded: Any) -> None:
        self.library = loaded
        self.target = Target(loaded.lowtide_lanes(), loaded.lowtide_registers())
        self.run = loaded.lowtide_run
        self.run.argtypes, self.run.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_void_p), None
        self.mark = loaded.lowtide_mark
        self.mark.argtypes, self.mark.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int), ctypes.c_uint64
        self.sum = loaded.lowtide_sum
        self.sum.argtypes, self.sum.restype = self.mark.argtypes, self.mark.restype


def team() -> Team:
    """This process's team. Raises NativeError where there is no compiler."""
    with _lock:
        return _team()


@cache
def _team() -> Team:
    if platform.system() != "Linux":
        raise NativeError(f"generated kernels are made for Linux, this is {platform.system()}")
    making = LibraryRecipe("generated kernels", partial(compile_library, _TEAM, options=FLAGS), _team_of)
    team: Team = library(directory(), f"team-{key(_TEAM.read_bytes())}.so", making)
    return team


def _team_of(path: Path) -> Team:
    try:
        return Team(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        raise NativeError(f"the library that was built does not load ({error})") from error


def network(source: str) -> Any:
    """The address of a network's function, and the library that has it, which is to be kept. Raises NativeError."""
    making = LibraryRecipe("generated kernels", partial(build, source), _network_of)
    return library(directory(), f"network-{key(source.encode())}.so", making)


def build(source: str, target: Path) -> None:
    """Compile a network's source. Raises NativeError."""
    text = target.with_suffix(".cpp")
    text.write_text(source, encoding="utf-8")
    compile_library(text, target, FLAGS, parts=min(processors(), 1 + len(source) // _PART_LETTERS))


def _network_of(path: Path) -> tuple[int, Any]:
    try:
        library = ctypes.CDLL(str(path))
        address = ctypes.cast(getattr(library, ENTRY), ctypes.c_void_p).value
    except (OSError, AttributeError) as error:
        raise NativeError(f"the library that was built does not load ({error})") from error
    address = there(address)
    return address, library


def key(source: bytes) -> str:
    """All that a library depends on: its source, the templates, the options, the machine and the compiler that is asked for."""
    circumstances = "\0".join((*FLAGS[:-1], platform.machine(), *platform.libc_ver(), processor(), os.environ.get("CXX", "")))
    templates = b"".join((_HERE / name).read_bytes() for name in _TEMPLATES)
    return hashlib.sha256(source + templates + circumstances.encode(errors="surrogateescape")).hexdigest()[:24]
