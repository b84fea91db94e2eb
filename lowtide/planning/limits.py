"""Limits as users write them: `memory=2**33`, `memory="8GiB"`, `memory="60%"`, `latency=1.1`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lowtide.planning.request import Budget

_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z%]*)\s*")
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_WISH = 'expected bytes as a whole number, a text such as "8GiB", "512 MB" or "60%" (of the unoptimised peak), or None'


@dataclass(frozen=True)
class Memory:
    """An amount of memory, in bytes or as a share of the peak of the program as it stands."""

    nbytes: int = 0
    share: float | None = None

    @classmethod
    def of(cls, given: int | str) -> Memory:
        """What a user wrote. Raises TypeError and ValueError, which say what is expected."""
        if isinstance(given, bool) or not isinstance(given, (int, str)):
            raise TypeError(f"memory: {_WISH}; got {given!r}")
        found = cls(given) if isinstance(given, int) else cls._read(given)
        if found is None or (found.nbytes <= 0 and not found.share):
            raise ValueError(f"memory: {_WISH}; got {given!r}")
        return found

    @classmethod
    def _read(cls, text: str) -> Memory | None:
        found = _AMOUNT.fullmatch(text)
        if found is None:
            return None
        number, unit = float(found[1]), found[2].lower()
        if unit == "%":
            return cls(share=number / 100)
        return cls(int(number * _UNITS[unit])) if unit in _UNITS else None

    def of_peak(self, eager_peak_bytes: int) -> int:
        """In bytes, of a program whose own peak is `eager_peak_bytes`."""
        return self.nbytes if self.share is None else int(self.share * eager_peak_bytes)


@dataclass(frozen=True)
class Limit:
    """What a step is to keep to, as users say it: an amount of memory, a multiple of the time, or nothing."""

    memory: Memory | None = None
    latency: float | None = None

    @classmethod
    def of(cls, memory: int | str | None, latency: float | None) -> Limit:
        """What a user wrote. Raises TypeError and ValueError, which say what is expected."""
        if memory is not None and latency is not None:
            raise TypeError("memory and latency: expected one limit or none, got both: the other is what is made as small as can be")
        return cls(None if memory is None else Memory.of(memory), checked_latency(latency))

    @property
    def is_limit(self) -> bool:
        """Whether there is something to keep to, so that times matter."""
        return self != Limit()

    def budget(self, eager_peak_bytes: int) -> Budget:
        """The same in bytes, for a program whose own peak is `eager_peak_bytes`."""
        return Budget(None if self.memory is None else self.memory.of_peak(eager_peak_bytes), self.latency)


def checked_latency(given: float | None) -> float | None:
    """A limit of time, as a multiple of the time without recomputation. Raises TypeError and ValueError."""
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"latency: expected a number such as 1.1 (at most a tenth slower), got {given!r}")
    if not 1 <= given < float("inf"):
        raise ValueError(f"latency: expected 1 or more, as a multiple of the time without recomputation; got {given!r}")
    return float(given)
