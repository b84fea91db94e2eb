"""A CPU as the model of kernels sees it: arithmetic, caches, memory, and what it costs to have threads wait for one another."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 2**10, "M": 2**20, "": 1}
_FLOPS_A_BYTE = (0.5, 0.9, 1.8)  # from the first, second and third cache: a core's arithmetic while a byte comes; measured on Zen 4
_KNOWN = (32 * 2**10, 2**20, 16 * 2**20)  # where the system does not tell


@dataclass(frozen=True, slots=True)
class Level:
    """A cache, or memory."""

    nbytes: int  # that one thread may fill
    bytes_per_us: float  # to one thread


@dataclass(frozen=True, slots=True)
class Core:
    """What one core does."""

    flops_per_us: float  # that generated products reach
    levels: tuple[Level, ...]  # nearest first; the last is memory, which holds all
    barrier_us: float = 1.0  # until all threads have arrived

    def level(self, nbytes: int) -> Level:
        """The nearest that holds so many bytes."""
        return next((each for each in self.levels if nbytes <= each.nbytes), self.levels[-1])

    def moving_us(self, moved_bytes: float, footprint_bytes: int) -> float:
        """The time to move bytes between a core and the nearest level that holds the footprint."""
        return moved_bytes / self.level(footprint_bytes).bytes_per_us


def machine_of(flops_per_us: float, memory_bytes_per_us: float, threads: int = 1, folder: Path = _CACHES) -> Core:
    """This machine, from what one core's products and copies reach; the last cache is shared by the threads."""
    sizes = _cache_bytes(folder) or _KNOWN
    rates = (*_FLOPS_A_BYTE, *([_FLOPS_A_BYTE[-1]] * len(sizes)))
    levels = [
        Level(size // (threads if at == len(sizes) - 1 else 1), max(flops_per_us / rate, memory_bytes_per_us))
        for at, (size, rate) in enumerate(zip(sizes, rates, strict=False))
    ]
    return Core(flops_per_us, (*levels, Level(2**62, memory_bytes_per_us)))


def _cache_bytes(folder: Path) -> tuple[int, ...]:
    """Sizes of the data caches, nearest first; nothing where the system does not tell."""
    found: dict[int, int] = {}
    try:
        for index in sorted(folder.glob("index*")):
            if (index / "type").read_text().strip() in ("Data", "Unified"):
                size = re.fullmatch(r"(\d+)([KM]?)", (index / "size").read_text().strip())
                if size is not None:
                    found[int((index / "level").read_text())] = int(size[1]) * _UNITS[size[2]]
    except (OSError, ValueError):
        return ()
    return tuple(size for _, size in sorted(found.items()))
