"""Memory looked at, and networks called, by native code: `calls.cpp`, built by the system's compiler, once, and kept."""

from __future__ import annotations

import ctypes
from functools import cache, partial
from pathlib import Path

from lowtide.base.folders import directory
from lowtide.runtime.compiler import NativeError, compile_library
from lowtide.runtime.libraries import Making, library
from lowtide.runtime.networks.built import key

_SOURCE = Path(__file__).with_name("calls.cpp")


class Native:
    """The library's functions."""

    def __init__(self, path: Path) -> None:
        waits, holds = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))  # which lets other Python threads run, and does not
        self.call, self.unchanged = waits.lowtide_call, holds.lowtide_unchanged
        self.call.argtypes = (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
        self.unchanged.argtypes = (ctypes.c_void_p, ctypes.c_int)


@cache
def native() -> Native:
    """The library, built where it has to be. Raises NativeError."""
    opened: Native = library(
        directory(), f"calls-{key(_SOURCE.read_bytes())}.so", Making("quick calls", partial(compile_library, _SOURCE), _opened)
    )
    return opened


def _opened(path: Path) -> Native:
    try:
        return Native(path)
    except (OSError, AttributeError) as error:
        raise NativeError(f"the library that was built does not load ({error})") from error
