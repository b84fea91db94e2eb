"""What is asked of planning: a limit, the machine, how far to look, and who looks on.

Users write limits as `memory=2**33`, `memory="8GiB"`, `memory="60%"`, `memory={"cuda": "24GiB", "host": "48GiB"}`, `latency=1.1`; a search
knows bytes and times. Effort has three levels, of which each holds all that the one before finds: more effort is never worse.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from threading import Lock
from typing import TypeAlias

from lowtide.base.messages import bytes_text
from lowtide.cost.device import Device
from lowtide.plan.plan import Provenance
from lowtide.remat.archive import Archive, Point
from lowtide.remat.sweep import Sweep, SweepListener, as_part
from lowtide.schedule import AUTO, Solver

_SWEEPS = {"quick": Sweep(max_states=600, max_runs=6_000_000), "normal": Sweep(max_states=15_600, max_runs=12_000_000), "thorough": Sweep()}


class Effort(str, Enum):
    """A level. Effort is counted in schedules that are built and costed, and reads no clock."""

    QUICK = "quick"
    NORMAL = "normal"
    THOROUGH = "thorough"

    @classmethod
    def of(cls, given: str | Effort) -> Effort:
        """What a user wrote. Raises ValueError, which says what is expected."""
        try:
            return cls(given)
        except ValueError:
            names = ", ".join(repr(level.value) for level in cls)
            raise ValueError(f"effort: expected one of {names}, got {given!r}; `search=lowtide.Sweep(...)` says more") from None

    @property
    def sweeps(self) -> tuple[Sweep, ...]:
        """The searches of this level and of those below, the quickest first; all that they find is put together."""
        levels = list(Effort)
        return tuple(_SWEEPS[level.value] for level in levels[: levels.index(self) + 1])


def sweeps_of(effort: str | Effort | None, search: Sweep | None) -> tuple[Sweep, ...]:
    """The searches that are asked for: those of a level, the middle one where nothing is said, or one of the caller's own.

    Raises TypeError where both are given, ValueError for what is no level.
    """
    if search is None:
        return Effort.of(Effort.NORMAL if effort is None else effort).sweeps
    if effort is not None:
        raise TypeError("effort and search: expected one of them, got both; a Sweep says all that a level does")
    return (search,)


@dataclass(frozen=True)
class Progress:
    """A search under way, and the best plan so far: the fastest within a limit of memory, the leanest within one of time."""

    share: float  # of the effort that is done
    peak_bytes: int  # with what is resident; of the leanest plan of all where none keeps to the limit yet
    slower: float  # its time over that without recomputation, less 1
    memory_bytes: int | None = None  # the limit, or else
    latency: float | None = None  # that

    def __str__(self) -> str:
        best = f"{self.share:.0%} done, best so far {bytes_text(self.peak_bytes)} and time {self.slower:+.1%}"
        if self.memory_bytes is None:
            return f"{best}, limit time {(self.latency or 1.0) - 1:+.1%}"
        return f"{best}, limit {bytes_text(self.memory_bytes)}{' not met yet' if self.peak_bytes > self.memory_bytes else ''}"


Watcher: TypeAlias = Callable[[Progress], None]


class ProgressWatch:
    """Listens to a search, whose two halves may run at once, and passes on the best of both and of what was known before."""

    def __init__(self, watcher: Watcher, budget: Budget, known: Iterable[Point]) -> None:
        self._watcher, self._budget = watcher, budget
        self._seen, self._lock = Archive.of(known), Lock()

    def __call__(self, share: float, archive: Archive) -> None:
        """Of a search under way: the share that is done, and what it has found."""
        with self._lock:
            for point in list(archive.all_points):
                self._seen.add(point)
            best, plain_us = self._best(), self._seen.points[-1].time_us
            slower = best.time_us / plain_us - 1 if plain_us else 0.0
            self._watcher(Progress(share, best.peak_bytes, slower, self._budget.memory_bytes, self._budget.latency))

    def _best(self) -> Point:
        memory_bytes, host_bytes = self._budget.memory_bytes, self._budget.host_bytes
        points = self._seen.points if host_bytes is None else self._seen.pinning(host_bytes)
        if memory_bytes is not None:
            return self._seen.within(memory_bytes, host_bytes) or points[0]
        most_us = (self._budget.latency or 1.0) * points[-1].time_us
        return next((each for each in points if each.time_us <= most_us), points[-1])


def in_turn(listener: SweepListener | None, sweeps: Sequence[Sweep]) -> list[SweepListener | None]:
    """A listener for each of several searches, one after another, that tells `listener` the share of all."""
    total, before, listeners = sum(sweep.max_states for sweep in sweeps) or 1, 0, list[SweepListener | None]()
    for sweep in sweeps:
        listeners.append(None if listener is None else partial(as_part, listener, before / total, sweep.max_states / total))
        before += sweep.max_states
    return listeners


@dataclass(frozen=True)
class Budget:
    """What a plan may take: bytes of peak, with what is resident, or time as a multiple of that without recomputation; or no limit."""

    memory_bytes: int | None = None
    latency: float | None = None
    host_bytes: int | None = None  # that may be pinned on the host; by itself no limit, since without one nothing is copied there

    @property
    def is_limit(self) -> bool:
        """Whether there is something to keep to, so that times matter."""
        return self.memory_bytes is not None or self.latency is not None

    def at_most(self, unlimited_bytes: float) -> Budget:
        """The same limit, or what a plan without one takes, if that is less: less memory never gives a higher peak."""
        if self.memory_bytes is None or self.memory_bytes <= unlimited_bytes:
            return self
        return replace(self, memory_bytes=int(unlimited_bytes))


NO_LIMIT = Budget()


@dataclass(frozen=True)
class Request:
    provenance: Provenance  # with what the plan is made, and for which device
    budget: Budget = Budget()
    exact: bool = True  # only graphs that compute the captured one's numbers to the last bit
    granule_bytes: int = 1  # the device's allocator rounds every size up to this
    links: Device | None = None  # the device over whose links to a host tensors may be swapped; None for no swapping
    swap_state: bool = False  # parameters and optimizer state may be swapped, too
    solver: Solver = AUTO  # of orders
    sweeps: tuple[Sweep, ...] = Effort.NORMAL.sweeps  # how far to look for what to compute again and what to swap: all of these
    watcher: Watcher | None = field(default=None, compare=False)  # hears how far the search has come; changes no answer


_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z%]*)\s*")
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_WISH = 'expected bytes as a whole number, a text such as "8GiB", "512 MB" or "60%" (of the unoptimised peak), or None'
_MOST_BYTES = 2**63 - 1
_DEVICES = ("cuda", "cpu")
HOST = "host"

# Of one device, or by name of the device's memory and the host's.
MemoryLimits: TypeAlias = int | str | Mapping[str, int | str | None] | None


def _amount(given: int | str) -> tuple[int | None, float | None]:
    """Bytes, or the share of a peak, as a user wrote them. Raises TypeError and ValueError, which say what is expected."""
    if isinstance(given, bool) or not isinstance(given, (int, str)):
        raise TypeError(f"memory: {_WISH}; got {given!r}")
    nbytes, share = (given, None) if isinstance(given, int) else _read(given)
    if not share and (nbytes is None or nbytes <= 0):
        raise ValueError(f"memory: {_WISH}; got {given!r}")
    if nbytes is not None and nbytes > _MOST_BYTES:
        raise ValueError(f"memory: expected at most {_MOST_BYTES} bytes, got more")
    return nbytes, share


def _read(text: str) -> tuple[int | None, float | None]:
    amount = _AMOUNT.fullmatch(text)
    if amount is None:
        return None, None
    number, unit = min(float(amount[1]), 2.0**63), amount[2].lower()
    if unit == "%":
        return None, number / 100
    return (int(number * _UNITS[unit]) if unit in _UNITS else None), None


@dataclass(frozen=True)
class Limit:
    """What a step is to keep to, as users say it: an amount of memory, a multiple of the time, or nothing."""

    memory_bytes: int | None = None
    latency: float | None = None
    host_bytes: int | None = None  # that may be pinned, beside either
    share: float | None = None  # of the peak of the program as it stands, in the place of bytes
    device: str = ""  # whose memory was limited by its name

    @classmethod
    def of(cls, memory: MemoryLimits, latency: float | None = None) -> Limit:
        """What a user wrote. Raises TypeError and ValueError, which say what is expected."""
        limit = cls._of_memories(memory) if isinstance(memory, Mapping) else cls() if memory is None else cls()._with(memory)
        if limit.is_of_memory and latency is not None:
            raise TypeError("memory and latency: expected one limit or none, got both: the other is what is made as small as can be")
        return replace(limit, latency=checked_latency(latency))

    @classmethod
    def _of_memories(cls, given: Mapping[str, int | str | None]) -> Limit:
        named = [name for name in given if name != HOST]
        if not given or len(named) > 1 or not set(named) <= set(_DEVICES):
            raise ValueError(
                f'memory: expected limits by name, of the device that the program runs on and of the host, such as {{"cuda": "24GiB", '
                f'"{HOST}": "48GiB"}}; got {dict(given)!r}'
            )
        host = given.get(HOST)
        device = given[named[0]] if named else None
        limit = cls(host_bytes=None if host is None else _host_bytes(host), device="".join(named))
        return limit if device is None else limit._with(device)

    def _with(self, memory: int | str) -> Limit:
        nbytes, share = _amount(memory)
        return replace(self, memory_bytes=nbytes, share=share)

    @property
    def is_of_memory(self) -> bool:
        return self.memory_bytes is not None or self.share is not None

    @property
    def is_limit(self) -> bool:
        """Whether there is something to keep to, so that times matter: without, nothing is copied to the host, whatever it has room for."""
        return self.is_of_memory or self.latency is not None

    @property
    def given(self) -> MemoryLimits:
        """The limits of memory, as users write them in bytes; a share is none."""
        by_name = {self.device or _DEVICES[0]: self.memory_bytes, HOST: self.host_bytes}
        return self.memory_bytes if self.host_bytes is None else {name: nbytes for name, nbytes in by_name.items() if nbytes is not None}

    def within(self, memory_bytes: int) -> Limit:
        """So many bytes of the device in place of another limit; that of the host stays."""
        return replace(self, memory_bytes=memory_bytes, share=None, latency=None)

    def fixed(self, eager_peak_bytes: int) -> Limit:
        """The same with a share in bytes, of a program whose own peak is `eager_peak_bytes`."""
        return self if self.share is None else self.within(min(int(self.share * eager_peak_bytes), _MOST_BYTES))

    def budget(self, eager_peak_bytes: int) -> Budget:
        """The same in bytes, for a program whose own peak is `eager_peak_bytes`."""
        return Budget(self.fixed(eager_peak_bytes).memory_bytes, self.latency, self.host_bytes)


def _host_bytes(given: int | str) -> int:
    """Raises ValueError for a share: the program as it stands pins nothing, so that there is nothing that it could be of."""
    wish = f'memory: expected of the {HOST} bytes as a whole number above 0, or a text such as "48GiB"'
    if isinstance(given, bool) or not isinstance(given, (int, str)):
        raise TypeError(f"{wish}; got {given!r}")
    if given == 0:
        raise ValueError(f"{wish}; got 0: to copy nothing there, leave `{HOST}` out and say run=lowtide.Run(swap=False)")
    try:
        nbytes, share = _amount(given)
    except ValueError:
        raise ValueError(f"{wish}; got {given!r}") from None
    if nbytes is None or share is not None:
        raise ValueError(f"{wish}; got {given!r}: a share is of the program's own peak, and as it stands it pins nothing on the {HOST}")
    return nbytes


def checked_latency(given: float | None) -> float | None:
    """A limit of time, as a multiple of the time without recomputation. Raises TypeError and ValueError."""
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"latency: expected a number such as 1.1 (at most a tenth slower), got {given!r}")
    if not 1 <= given < float("inf"):
        raise ValueError(f"latency: expected 1 or more, as a multiple of the time without recomputation; got {given!r}")
    return float(given)
