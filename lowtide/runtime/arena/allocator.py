"""The planned allocator's Python side: recording what a stretch of a program asks for, and serving it from an arena.

    result, recorded = allocator.record(call)                # the requests of this thread, while `call` runs
    result, counts = allocator.serve(region, script, call)

Both hold for the thread that calls and end with the call, whatever happens in it: beginning and end are the library's, in one call of C,
and no interrupt can come between. `BusyError` says that they cannot begin; then `call` has not run.
"""

from __future__ import annotations

import ctypes
import dataclasses
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
ALIGN_BYTES = 64  # as PyTorch's allocator aligns; some kernels' last bits depend on it
ALIGN_BYTES_ON_GPU = 512
Result = TypeVar("Result")
OUTLIVES = -1  # the offset of a request that is not to be served from the arena

_ANSWERS = {
    1: "in a forked process",
    2: "within another step",
    3: "another allocator was put before lowtide's",
    4: "the arena is too small for the script",
    5: "the allocator that is in use cannot give raw memory",
    6: "the system gives no memory to note requests in",
}


class BusyError(Exception):
    """Why requests can be neither recorded nor served now."""


@dataclass
class Counts:
    """What was asked for within a block, and what became of it: requests, and their bytes. Filled in when the block ends."""

    requests: int = 0  # by the block's thread
    request_bytes: int = 0
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


class _Made:
    """Something of the library's, which goes with this object.

    The library itself puts down here what it has made: an interrupt that comes right after finds it.
    """

    def __init__(self, drop: Any) -> None:
        self._made = ctypes.c_void_p()
        # Not when the process ends, as other threads may still run.
        weakref.finalize(self, _drop, drop, self._made).atexit = False

    @property
    def handle(self) -> int:
        assert self._made.value is not None
        return self._made.value

    @property
    def _place(self) -> Any:
        return ctypes.byref(self._made)


class ArenaMemory(_Made):
    """An arena's memory. It goes with this object; pages on which tensors lie by then go with the last of these."""

    def __init__(self, allocator: Allocator, nbytes: int) -> None:
        self._library = allocator.library
        super().__init__(self._library.lowtide_region_drop)
        if self._library.lowtide_region(nbytes, self._place):
            raise MemoryError(f"the system gives no {nbytes} bytes for an arena")
        self.nbytes = nbytes
        self.base: int = self._library.lowtide_region_base(self.handle)

    @property
    def is_there(self) -> bool:
        """Whether it can serve: where the device has no more, PyTorch takes what lies idle, as for an evaluation between steps."""
        return bool(self._library.lowtide_region_there(self.handle))

    @property
    def live(self) -> int:
        return int(self._library.lowtide_region_live(self.handle))

    def holds(self, address: int) -> bool:
        return self.base <= address < self.base + self.nbytes


class Script(_Made):
    """Recorded requests with their offsets in an arena; with `up_to` what is asked for may be smaller than what was recorded.

    Of a guess, `steps` are the nodes that ask, ascending, each in an order that only it knows. `spaces`, [n, 3], are rooms for their
    workspaces: offset, bytes and step, by steps.
    """

    def __init__(
        self, allocator: Allocator, size_bytes: Ints, offsets: Ints, *, up_to: bool = False, steps: Ints | None = None,
        spaces: Ints | None = None,
    ) -> None:  # fmt: skip
        """Raises BusyError where there is no memory for it."""
        sizes, places = (np.ascontiguousarray(each, np.int64) for each in (size_bytes, offsets))
        if sizes.shape != places.shape or sizes.ndim != 1 or (sizes < 1).any() or (places[places != OUTLIVES] % ALIGN_BYTES != 0).any():
            raise ValueError(f"expected an offset that is OUTLIVES or a multiple of {ALIGN_BYTES} for each size above 0")
        super().__init__(allocator.library.lowtide_script_drop)
        self.arena_bytes = int((places + sizes)[places != OUTLIVES].max(initial=0))
        rooms = np.ascontiguousarray(np.zeros((0, 3)) if spaces is None else spaces, np.int64)
        nodes = None if steps is None else np.ascontiguousarray(steps, np.int64)
        rest = (int(up_to), None if nodes is None else _pointer(nodes), len(rooms), _pointer(rooms), self._place)
        _check(allocator.library.lowtide_script(len(sizes), _pointer(sizes), _pointer(places), *rest))


class _Recording(_Made):
    def __init__(self, library: Any) -> None:
        super().__init__(library.lowtide_recording_drop)
        self._library = library
        _check(library.lowtide_recording(self._place))

    def ended(self) -> Recorded:
        """What was recorded. Raises BusyError where there was no memory to note it in."""
        count = self._library.lowtide_recorded(self.handle)
        if count < 0:
            raise BusyError(_ANSWERS[6])
        sizes, born, died = (np.zeros(count, np.int64) for _ in range(3))
        self._library.lowtide_take(self.handle, _pointer(sizes), _pointer(born), _pointer(died))
        return Recorded(sizes, born, died)


class Allocator:
    """The planned allocator, in its place before PyTorch's. It stays there: tensors know it."""

    def __init__(self, library: Any, *, on_gpu: bool = False) -> None:
        """Takes what `native.load` gives, of `runtime.arena` or of `cuda`. Raises BusyError where it cannot take its place."""
        self.library, self.on_gpu = library, on_gpu
        self.align_bytes = ALIGN_BYTES_ON_GPU if on_gpu else ALIGN_BYTES
        _check(self.library.lowtide_install())

    def record(
        self, call: Callable[[], Result], region: ArenaMemory | None = None, script: Script | None = None
    ) -> tuple[Result, Recorded | None]:
        """A call's result, and what this thread asked for in it; None where there was no memory to note that. Raises BusyError.

        With a region it is served meanwhile, too, as a script says that guesses what each node of a program will ask for: the library
        wants to be told of them (`lowtide_at`).
        """
        recording, answer = _Recording(self.library), ctypes.c_int()
        served = (None, None) if region is None or script is None else (region.handle, script.handle)
        result = self.library.lowtide_record(recording.handle, *served, ctypes.byref(answer), _CALL, call, lambda: _check(answer.value))
        try:
            return result, recording.ended()
        except BusyError:
            return result, None

    def serve(self, region: ArenaMemory, script: Script, call: Callable[[], Result]) -> tuple[Result, Counts]:
        """A call's result, with this thread's requests served as the script has them, and what became of them. Raises BusyError."""
        counts, answer = _Counts(), ctypes.c_int()
        result = self.library.lowtide_serve(
            region.handle, script.handle, ctypes.byref(counts), ctypes.byref(answer), _CALL, call, lambda: _check(answer.value)
        )
        return result, Counts(**{name: getattr(counts, name) for name in _COUNTED})

    def aside(self, call: Callable[[], Result]) -> Result:
        """A call's result. What this thread asks for in it belongs to no recording and no arena."""
        result: Result = self.library.lowtide_aside(_CALL, call)
        return result

    def alone(self, flag: ctypes.c_int, call: Callable[[], Result], otherwise: Callable[[], Result]) -> Result:
        """The result of `call`, which runs while the flag is up; where it was up already, that of `otherwise`."""
        result: Result = self.library.lowtide_alone(ctypes.byref(flag), _CALL, call, otherwise)
        return result


_CALL = ctypes.cast(ctypes.pythonapi.PyObject_CallNoArgs, ctypes.c_void_p)


def _drop(drop: Any, allocation: ctypes.c_void_p) -> None:
    if allocation.value is not None:
        drop(allocation.value)


def _check(answer: int) -> None:
    if answer:
        raise BusyError(_ANSWERS[answer])


def _pointer(array: Ints) -> Any:
    return array.ctypes.data_as(ctypes.c_void_p)
