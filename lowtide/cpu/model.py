"""The time of a kernel before it exists: its arithmetic, and what it moves by the level that holds that; a core does not do both at once.

A part by itself reads what another stage has written some time ago, and its result is read some time later: both come from where they fit.
Joined, what is between the operators comes from where the ring or the tile fits, and what goes in and out from where it fits by itself;
but all weights pass once for each row of a ring, and inputs and results once for each tile of channels.

The CPU of this model has arithmetic, caches, memory, and a price at which threads wait for one another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from lowtide.cost.device import node_flops
from lowtide.cpu.partition import CONSTANT
from lowtide.cpu.reform import KernelShape, Part, Scheme
from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.shapes import ints
from lowtide.ir.sizes import ITEM_BYTES

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
    sizes: dict[int, int] = {}
    try:
        for index in sorted(folder.glob("index*")):
            if (index / "type").read_text().strip() in ("Data", "Unified"):
                size = re.fullmatch(r"(\d+)([KM]?)", (index / "size").read_text().strip())
                if size is not None:
                    sizes[int((index / "level").read_text())] = int(size[1]) * _UNITS[size[2]]
    except (OSError, ValueError):
        return ()
    return tuple(size for _, size in sorted(sizes.items()))


_SIMPLE_FLOPS = 2.0  # an element of a simple operator, by the count of arithmetic


@dataclass(frozen=True)
class Model:
    """Predicted times, in microseconds. A `Costs` of `reform`."""

    machine: Core
    threads: int = 1
    exists: Callable[[Sequence[Part], Scheme], bool] = lambda parts, scheme: True  # whether there is such a kernel

    def alone_us(self, part: Part) -> float:
        """The time of a part by itself. Raises CheckError where a shape is symbolic."""
        weights, given, result_bytes = _bytes(part)
        footprint = weights + given + result_bytes
        moved = self.machine.moving_us(weights, footprint) + self.machine.moving_us(given + result_bytes, given + result_bytes)
        return self._arithmetic_us(part) + moved / self.threads + self._barrier_us

    def joined_us(self, parts: Sequence[Part], shape: KernelShape) -> float | None:
        """The time of parts as one kernel; None where there is none."""
        if not self.exists(parts, shape.scheme):
            return None
        weights = sum(_bytes(part)[0] for part in parts)
        given, result_bytes = _bytes(parts[0])[1], _bytes(parts[-1])[2]
        beside = sum(_bytes(part)[1] for part in parts[1:]) - sum(_bytes(part)[2] for part in parts[:-1])
        between = 2 * sum(_bytes(part)[2] for part in parts[:-1])
        near = shape.ring_bytes + weights if shape.scheme is Scheme.ROWS else shape.ring_bytes
        moved = self.machine.moving_us(between, near)
        moved += self.machine.moving_us(given + max(0, beside) + result_bytes * (2 * shape.passes - 1), given + result_bytes)
        moved += self.machine.moving_us(given * (shape.passes - 1), given + result_bytes)
        moved += self.machine.moving_us(weights * shape.rows * self.threads, near)
        *first, last = [self._arithmetic_us(part) for part in parts]
        return sum(first) * shape.repeated + last + moved / self.threads + self._barrier_us

    @property
    def _barrier_us(self) -> float:
        return self.machine.barrier_us if self.threads > 1 else 0.0

    def _arithmetic_us(self, part: Part) -> float:
        return sum(map(_flops, part.nodes)) / self.machine.flops_per_us / self.threads


def _flops(node: Node) -> float:
    counted = node_flops(node)
    return counted or _SIMPLE_FLOPS * sum(prod(ints(node, value)) for value in node.outputs if value is not None)


def _bytes(part: Part) -> tuple[int, int, int]:
    """(weights, other arguments from outside, results that leave) of a part."""
    mine = part.makes
    read = dict.fromkeys(value for node in part.nodes for value in node.inputs if value not in mine)
    weights = sum(_nbytes(part.nodes[0], value) for value in read if value.storage.kind in CONSTANT)
    given = sum(_nbytes(part.nodes[0], value) for value in read if value.storage.kind not in CONSTANT)
    last = next((value for node in reversed(part.nodes) for value in node.outputs if value is not None), None)
    return weights, given, 0 if last is None else _nbytes(part.nodes[0], last)


def _nbytes(node: Node, value: Value) -> int:
    return prod(ints(node, value)) * ITEM_BYTES[value.dtype]
