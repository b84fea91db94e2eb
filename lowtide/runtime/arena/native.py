"""Builds the planned allocator with the system's compiler, once for each version of torch, and loads it.

    takes   a folder for what can be made again, or None
    leaves  a library that ctypes has loaded, or NativeError, which says why there is none

`runtime.libraries` says where it is kept.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from lowtide.runtime.libraries import FLAGS, LibraryRecipe, NativeError, compile_library, library, loaded, once, processor

__all__ = ["SOURCE", "NativeError", "key", "load", "opened"]

SOURCE = Path(__file__).with_name("allocator.cpp")


@once
def load(directory: Path | None) -> Any:
    """This process's library, built where there is none yet below `directory`. Raises NativeError."""
    if sys.platform != "linux":
        raise NativeError(f"the planned allocator is made for Linux, this is {platform.system()}")
    return library(directory, f"allocator-{key(SOURCE)}.so", LibraryRecipe("the planned allocator", _compile, opened))


def _compile(target: Path) -> None:
    root = Path(torch.__file__).parent
    compile_library(SOURCE, target, (*FLAGS, f"-I{root / 'include'}"), (f"-L{root / 'lib'}", "-lc10"))


def key(*sources: Path) -> str:
    """All that the library depends on; not the compiler that happens to be first, which may be gone once it has done its work."""
    chosen = os.environ.get("CXX", "")
    circumstances = (
        torch.__version__, torch.version.git_version, str(torch.compiled_with_cxx11_abi()), platform.machine(), *platform.libc_ver(),
        chosen, processor() if chosen else "", *FLAGS,
    )  # fmt: skip
    return hashlib.sha256(
        b"".join(path.read_bytes() for path in sources) + "\0".join(circumstances).encode(errors="surrogateescape")
    ).hexdigest()[:16]


def opened(path: Path, *, tries: bool = True) -> Any:
    """A library, loaded and tried, with the types of its functions: ctypes takes everything for an int. Raises NativeError."""
    with loaded(path) as library:
        for name, holds_lock, result, *arguments in _FUNCTIONS:
            make = ctypes.PYFUNCTYPE if holds_lock else ctypes.CFUNCTYPE
            setattr(library, f"lowtide_{name}", make(result, *arguments)((f"lowtide_{name}", library)))
    if tries and not _works(library):
        raise NativeError("the library that was built does not do what it should: set CXX to another compiler")
    return library


def _works(library: Any) -> bool:
    allocation = ctypes.c_void_p()
    if library.lowtide_region(64, ctypes.byref(allocation)) or not allocation.value:
        return False
    fine = library.lowtide_region_base(allocation) % 64 == 0 and library.lowtide_region_live(allocation) == 0
    library.lowtide_region_drop(allocation)
    return bool(fine)


_POINTER, _INTEGER, _STATUS, _OBJECT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.py_object
_FUNCTIONS: tuple[tuple[Any, ...], ...] = (  # name, whether it holds Python's lock, as what calls it back does; result, arguments
    ("install", False, _STATUS),
    ("region", False, _STATUS, _INTEGER, _POINTER),
    ("region_drop", False, None, _POINTER),
    ("region_base", False, _POINTER, _POINTER),
    ("region_there", False, _INTEGER, _POINTER),
    ("region_live", False, _INTEGER, _POINTER),
    ("script", False, _STATUS, _INTEGER, _POINTER, _POINTER, _STATUS, _POINTER, _INTEGER, _POINTER, _POINTER),
    ("script_drop", False, None, _POINTER),
    ("recording", False, _STATUS, _POINTER),
    ("recording_drop", False, None, _POINTER),
    ("recorded", False, _INTEGER, _POINTER),
    ("take", False, None, _POINTER, _POINTER, _POINTER, _POINTER),
    ("serve", True, _OBJECT, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _OBJECT, _OBJECT),
    ("record", True, _OBJECT, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _OBJECT, _OBJECT),
    ("at", True, None, _INTEGER),
    ("moves", True, _STATUS, _POINTER),
    ("aside", True, _OBJECT, _POINTER, _OBJECT),
    ("alone", True, _OBJECT, _POINTER, _POINTER, _OBJECT, _OBJECT),
    ("trim", False, None),
)
