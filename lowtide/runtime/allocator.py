"""The planned allocator's Python side: recording what a stretch of a program asks for, and serving it from an arena.

    with allocator.recording() as recorded:     # the requests of this thread
        ...
    with allocator.serving(region, script) as counts:
        ...

Both hold for the thread that enters them and end with the block, whatever happens in it. `BusyError` says that they cannot begin.
"""

from __future__ import annotations

import ctypes
import dataclasses
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
ALIGN_BYTES = 64  # as PyTorch's allocator aligns; some kernels' last bits depend on it
OUTLIVES = -1  # the offset of a request that is not to be served from the arena

_ANSWERS = {
    1: "in a forked process",
    2: "within another step",
    3: "another allocator was put before lowtide's",
    4: "the arena is too small for the script",
    5: "the allocator that is in use cannot give raw memory",
}


class BusyError(Exception):
    """Why requests can be neither recorded nor served now."""


@dataclass
class Counts:
    """What was asked for within a block, and what became of it: requests, and their bytes. Filled in when the block ends."""

    asked: int = 0  # by the block's thread
    asked_bytes: int = 0
    served: int = 0  # from the arena
    served_bytes: int = 0
    outliving: int = 0  # left to PyTorch's allocator: such a one was alive when the recorded block ended
    outliving_bytes: int = 0
    unexpected: int = 0  # left to it: not what was recorded at this place
    unexpected_bytes: int = 0
    occupied: int = 0  # left to it: recorded, but where it was to lie something was alive
    occupied_bytes: int = 0
    absent: int = 0  # recorded, and not asked for
    elsewhere: int = 0  # asked for by other threads meanwhile
    elsewhere_bytes: int = 0

    @property
    def deviates(self) -> bool:
        """Whether the block did not ask for what was recorded."""
        return bool(self.unexpected or self.absent or self.occupied)


_COUNTED = tuple(each.name for each in dataclasses.fields(Counts))


class _Counts(ctypes.Structure):
    """The same for ctypes, laid out as in allocator.cpp."""

    _fields_ = [(name, ctypes.c_int64) for name in _COUNTED]


@dataclass(frozen=True)
class Recorded:
    """Requests in their order. Times are ticks: one for each request and each release."""

    size_bytes: Ints  # [n]
    born: Ints  # [n]
    died: Ints  # [n] -1: alive when the block ended


class Region:
    """An arena's memory. It goes with this object, or with the last tensor that lies in it."""

    def __init__(self, allocator: Allocator, nbytes: int) -> None:
        handle = allocator.library.lowtide_region(nbytes)
        if not handle:
            raise MemoryError(f"the system gives no {nbytes} bytes for an arena")
        self.nbytes = nbytes
        self.handle: int = handle
        self.base: int = allocator.library.lowtide_region_base(handle)
        self._library = allocator.library
        _at_end(self, allocator.library.lowtide_region_drop, handle)

    @property
    def live(self) -> int:
        """How many blocks lie in it now."""
        return int(self._library.lowtide_region_live(self.handle))

    def holds(self, address: int) -> bool:
        """Whether an address lies in it."""
        return self.base <= address < self.base + self.nbytes


class Script:
    """Recorded requests with their offsets in an arena."""

    def __init__(self, allocator: Allocator, size_bytes: Ints, offsets: Ints) -> None:
        sizes, places = (np.ascontiguousarray(each, np.int64) for each in (size_bytes, offsets))
        if sizes.shape != places.shape or sizes.ndim != 1 or (sizes < 1).any() or (places[places != OUTLIVES] % ALIGN_BYTES != 0).any():
            raise ValueError(f"expected an offset that is OUTLIVES or a multiple of {ALIGN_BYTES} for each size above 0")
        self.arena_bytes = int((places + sizes)[places != OUTLIVES].max(initial=0))
        self.handle: int = allocator.library.lowtide_script(len(sizes), _pointer(sizes), _pointer(places))
        _at_end(self, allocator.library.lowtide_script_drop, self.handle)


class Allocator:
    """The planned allocator, in its place before PyTorch's. It stays there: tensors know it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises BusyError where it cannot take its place."""
        self.library = _typed(library)
        _check(self.library.lowtide_install())

    @contextmanager
    def recording(self) -> Iterator[list[Recorded]]:
        """Record this thread's requests: the list's one item once the block has ended without an error. Raises BusyError."""
        handle, found = ctypes.c_void_p(), list[Recorded]()
        _check(self.library.lowtide_record(ctypes.byref(handle)))
        try:
            yield found
        finally:
            self.library.lowtide_end(ctypes.byref(_Counts()))
            recorded = self._take(handle)
        found.append(recorded)

    @contextmanager
    def serving(self, region: Region, script: Script) -> Iterator[Counts]:
        """Serve this thread's requests as the script has them. Raises BusyError."""
        counts, told = Counts(), _Counts()
        _check(self.library.lowtide_begin(region.handle, script.handle))
        try:
            yield counts
        finally:
            self.library.lowtide_end(ctypes.byref(told))
            for name in _COUNTED:
                setattr(counts, name, getattr(told, name))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What this thread asks for in this block belongs to no recording and no arena."""
        suspended = self.library.lowtide_suspend()
        try:
            yield
        finally:
            self.library.lowtide_resume(suspended)

    def trim(self) -> None:
        """Give back to the system what the C library keeps of memory that was let go."""
        self.library.lowtide_trim()

    def _take(self, handle: ctypes.c_void_p) -> Recorded:
        count = self.library.lowtide_recorded(handle)
        sizes, born, died = (np.zeros(count, np.int64) for _ in range(3))
        self.library.lowtide_take(handle, _pointer(sizes), _pointer(born), _pointer(died))
        return Recorded(sizes, born, died)


def _at_end(of: object, drop: Any, handle: int) -> None:
    """Drop a handle with its object; not when the process ends, as other threads may still run."""
    weakref.finalize(of, drop, handle).atexit = False


def _check(answer: int) -> None:
    if answer:
        raise BusyError(_ANSWERS[answer])


def _pointer(array: Ints) -> Any:
    return array.ctypes.data_as(ctypes.c_void_p)


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of its functions: ctypes takes everything for an int."""
    pointer, integer, status = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    for name, result, *arguments in (
        ("install", status),
        ("region", pointer, integer),
        ("region_drop", None, pointer),
        ("region_base", pointer, pointer),
        ("region_live", integer, pointer),
        ("script", pointer, integer, pointer, pointer),
        ("script_drop", None, pointer),
        ("begin", status, pointer, pointer),
        ("record", status, pointer),
        ("end", None, pointer),
        ("recorded", integer, pointer),
        ("take", None, pointer, pointer, pointer, pointer),
        ("trim", None),
        ("suspend", pointer),
        ("resume", None, pointer),
    ):
        function = getattr(library, f"lowtide_{name}")
        function.restype, function.argtypes = result, arguments
    return library
