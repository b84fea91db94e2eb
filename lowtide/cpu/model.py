"""The time of a kernel before it exists: its arithmetic, and what it moves by the level that holds that; a core does not do both at once.

A stage by itself reads what another one has written some time ago, and its result is read some time later: both come from where they fit.
As a block, what is between the stages comes from where the ring fits, and what goes in and out from where it fits by itself; but all
weights pass once for each row of a ring. The model is of one core: arithmetic, caches, memory.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeAlias

from lowtide.cost.device import node_flops
from lowtide.cpu.stages import Convolution, Product, RowBlock, Windows
from lowtide.errors import there
from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.nodes import is_view
from lowtide.ir.operators.row import ints
from lowtide.ir.sizes import ITEM_BYTES

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 2**10, "M": 2**20, "": 1}
_FLOPS_A_BYTE = (0.5, 0.9, 1.8)  # from the first, second and third cache: a core's arithmetic while a byte comes; measured on Zen 4
_KNOWN = (32 * 2**10, 2**20, 16 * 2**20)  # where the system does not tell
_SIMPLE_FLOPS = 2.0  # an element of a simple operator, by the count of arithmetic
_FLOPS_PER_US, _MEMORY_BYTES_PER_US = 100e3, 8e3  # of a core; only their ratio matters

_Stage: TypeAlias = Product | Convolution | Windows


@dataclass(frozen=True, slots=True)
class Level:
    """A cache, or memory."""

    nbytes: int
    bytes_per_us: float


@dataclass(frozen=True, slots=True)
class Core:
    """What one core does."""

    flops_per_us: float  # that generated products reach
    levels: tuple[Level, ...]  # nearest first; the last is memory, which holds all

    def moving_us(self, moved_bytes: float, footprint_bytes: int) -> float:
        """The time to move bytes between the core and the nearest level that holds the footprint."""
        level = next((each for each in self.levels if footprint_bytes <= each.nbytes), self.levels[-1])
        return moved_bytes / level.bytes_per_us


def core_here(folder: Path = _CACHES) -> Core:
    """A core with this machine's caches."""
    sizes = _cache_bytes(folder) or _KNOWN
    rates = (*_FLOPS_A_BYTE, *([_FLOPS_A_BYTE[-1]] * len(sizes)))
    levels = (Level(size, max(_FLOPS_PER_US / rate, _MEMORY_BYTES_PER_US)) for size, rate in zip(sizes, rates, strict=False))
    return Core(_FLOPS_PER_US, (*levels, Level(2**62, _MEMORY_BYTES_PER_US)))


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


class BlockTimes(NamedTuple):
    """What a block takes by prediction, in microseconds."""

    joined_us: float
    apart_us: float  # its stages one after the other

    @property
    def gain(self) -> float:
        """By how much the block is faster, as a share of its stages' time."""
        return 1.0 - self.joined_us / self.apart_us if self.apart_us else 0.0


def block_times(block: RowBlock, fixed: Collection[Value], core: Core) -> BlockTimes | None:
    """Of a block of convolutions and products, given what is constant; None where what is between changes its shape on the way."""
    parts = block.parts
    if not all(_is_straight(*pair, fixed) for pair in pairwise(parts)):
        return None
    arithmetic_us = sum(_flops(node) for part in parts for node in part.nodes) / core.flops_per_us
    moves = [_Moves.of(part, fixed) for part in parts]
    apart_us = sum(core.moving_us(each.weights, sum(each)) + core.moving_us(each.others, each.others) for each in moves)
    weights, between = sum(each.weights for each in moves), sum(each.result for each in moves[:-1])
    beside = max(0, sum(each.given for each in moves[1:]) - between)
    near, around = _ring_bytes(parts) + weights, moves[0].given + moves[-1].result
    joined_us = core.moving_us(2 * between + weights * _rows(_shape(parts[-1])), near) + core.moving_us(around + beside, around)
    return BlockTimes(arithmetic_us + joined_us, arithmetic_us + apart_us)


class _Moves(NamedTuple):
    """Bytes of a stage's constants, of what else it reads from outside, and of its result."""

    weights: int
    given: int
    result: int

    @property
    def others(self) -> int:
        return self.given + self.result

    @classmethod
    def of(cls, part: _Stage, fixed: Collection[Value]) -> _Moves:
        inside = {value for node in part.nodes for value in node.results}
        read = dict.fromkeys(value for node in part.nodes for value in node.inputs if value not in inside)
        weights = sum(_nbytes(part.nodes[0], value) for value in read if value in fixed)
        given = sum(_nbytes(part.nodes[0], value) for value in read if value not in fixed)
        return cls(weights, given, _nbytes(part.nodes[0], part.nodes[-1].results[0]))


def _is_straight(part: _Stage, following: _Stage, fixed: Collection[Value]) -> bool:
    """Whether what is between two stages keeps its shape, element by element."""
    given = next(value for value in following.nodes[0].inputs if value not in fixed)
    return not any(map(is_view, part.nodes)) and _shape(part) == ints(following.nodes[0], given)


def _ring_bytes(parts: tuple[_Stage, ...]) -> int:
    """Of the rows that windows and products still need of what is between."""
    ring_bytes = 0
    for part, following in pairwise(parts):
        shape = _shape(part)
        ring_bytes += prod(shape) // _rows(shape) * min(_span(following), _rows(shape)) * ITEM_BYTES["float32"]
    return ring_bytes


def _span(stage: _Stage) -> int:
    """The rows that a row of a stage needs, where the next one needs some of them again; else it is done with one at a time."""
    if not isinstance(stage, Windows) or stage.out.shape[2] == 1:
        return 1
    geometry = stage.geometry
    span = 1 + (geometry.kernel[0] - 1) * geometry.dilation[0]
    return span if span > geometry.stride[0] else 1


def _shape(stage: _Stage) -> tuple[int, ...]:
    """Of what its first operator makes."""
    return ints(stage.nodes[0], there(stage.nodes[0].outputs[0]))


def _rows(shape: tuple[int, ...]) -> int:
    return shape[2] if len(shape) == 4 else shape[0]


def _flops(node: Node) -> float:
    return node_flops(node) or _SIMPLE_FLOPS * sum(prod(ints(node, value)) for value in node.results)


def _nbytes(node: Node, value: Value) -> int:
    return prod(ints(node, value)) * ITEM_BYTES[value.dtype]
