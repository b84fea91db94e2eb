"""Memory looked at, and networks called, by native code: `calls.cpp`, built by the system's compiler, once, and kept."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.base.folders import directory
from lowtide.base.words import Words
from lowtide.runtime.compiler import NativeError, compile_library
from lowtide.runtime.libraries import Making, library
from lowtide.runtime.networks.built import key

_SOURCE = Path(__file__).with_name("calls.cpp")


class _Watched(ctypes.Structure):
    _fields_ = (
        ("firm", ctypes.c_int64),
        ("at", ctypes.c_void_p),
        ("seen", ctypes.c_void_p),
        ("beyond", ctypes.c_int64),
        ("beyond_at", ctypes.c_void_p),
        ("beyond_seen", ctypes.c_void_p),
        ("marks", ctypes.c_int64),
        ("mark_at", ctypes.c_void_p),
        ("marked", ctypes.c_void_p),
    )


class Unchanged:
    """Whether memory is what it was: words, those that they lead to, and numbers of 32 bits that lie where these say.

    `alive` keeps all of it.
    """

    def __init__(self, firm: Sequence[Words], beyond: Sequence[Words], marks: Sequence[int], alive: object) -> None:
        marked = np.array([ctypes.c_uint32.from_address(at).value for at in marks], np.uint32)
        arrays = (*_joined(firm), *_joined(beyond), np.array(marks, np.uint64), marked)
        self._held = arrays, alive
        counts_and_arrays = zip(arrays[::2], arrays[1::2], strict=True)
        self._its = _Watched(*(each for at, seen in counts_and_arrays for each in (len(at), at.ctypes.data, seen.ctypes.data)))
        self._at, self._same = ctypes.addressof(self._its), native().unchanged

    def __call__(self) -> bool:
        """Whether it is."""
        return bool(self._same(self._at))


class Native:
    """The library's functions."""

    def __init__(self, path: Path) -> None:
        waits, holds = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))  # which lets other Python threads run, and does not
        self.call, self.unchanged = waits.lowtide_call, holds.lowtide_unchanged
        self.call.argtypes = (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
        self.unchanged.argtypes = (ctypes.c_void_p,)


def _joined(each: Sequence[Words]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Addresses, and the words there."""
    if not each:
        return np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    return np.concatenate([words.addresses for words in each]), np.concatenate([words.seen for words in each])


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
