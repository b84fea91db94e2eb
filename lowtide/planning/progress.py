"""How far a search has come and what it has found, for whoever looks on; nothing is decided by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TypeAlias

from lowtide.base.units import bytes_text
from lowtide.remat.sweep.archive import Archive, Point
from lowtide.remat.sweep.search import Listener, Sweep


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

    def __init__(self, watcher: Watcher, memory_bytes: int | None, latency: float | None, known: Sequence[Point]) -> None:
        self._watcher, self._memory_bytes, self._latency = watcher, memory_bytes, latency
        self._seen, self._lock = Archive(list(known)), Lock()

    def __call__(self, share: float, found: Archive) -> None:
        """Of a search under way: the share that is done, and what it has found."""
        with self._lock:
            for point in found.points:
                self._seen.add(point)
            best, plain_us = self._best(), self._seen.points[-1].time_us
            slower = best.time_us / plain_us - 1 if plain_us else 0.0
            self._watcher(Progress(share, best.peak_bytes, slower, self._memory_bytes, self._latency))

    def _best(self) -> Point:
        if self._memory_bytes is not None:
            return self._seen.within(self._memory_bytes) or self._seen.points[0]
        fastest = self._seen.points[-1]
        return self._seen.under((self._latency or 1.0) * fastest.time_us) or fastest


def in_turn(listener: Listener | None, sweeps: Sequence[Sweep]) -> list[Listener | None]:
    """A listener for each of several searches, one after another, that tells `listener` the share of all."""
    total, before, found = sum(sweep.max_states for sweep in sweeps) or 1, 0, list[Listener | None]()
    for sweep in sweeps:
        found.append(None if listener is None else partial(_of_all, listener, before / total, sweep.max_states / total))
        before += sweep.max_states
    return found


def _of_all(listener: Listener, before: float, weight: float, share: float, found: Archive) -> None:
    listener(before + weight * share, found)
