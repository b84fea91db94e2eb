"""What was decided for a network on a small device: the order, where each block lies, what is moved, and what is promised of it.

**Blocks.** Tensors that share bytes are one block: a tensor, its views, and what is written over it in place. A block is alive over the
steps `[start, end)` of the order. What the caller gives is there from step 0, what it gets is there to the end. A workspace is a block
without tensors, alive in its own step. Constants lie in flash, in no block.

**Time, the stated model.** Every space is mapped: an operator reads and writes its tensors where they lie. Its step takes as long as its
multiplications, or as its reads and writes one after the other, whichever is longer: `max(macs / macs_per_s, sum(bytes / rate))`, each
tensor counted once. Views take no time. Constants are counted where the rate of flash is known. Each term is rounded up to a picosecond.

**Cuts.** A cut takes what its operators take. What is made within goes to a ring of its workspace and is read from there by each operator
that reads it, as often as bands make it again. What lies outside is read once by each operator, of which each band reads its own rows.
Weights are read anew at each turn, when slices of another operator came in between; slices along channels read their own, once.

**Moves.** A move copies a block to another space beneath the step before `before`: both are alive in that step, which may read
the block and does not write it. It takes its bytes at the slower of the two rates. With a DMA only what exceeds that step's time is added,
without one all of it. At most one block moves beneath a step, and none beneath a step that takes no time because it only makes views.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

from lowtide.base.messages import bytes_text, time_text
from lowtide.edge.cuts import Cut, cuts_of, extra_macs
from lowtide.edge.graph import EdgeGraph
from lowtide.errors import FormatError
from lowtide.problems import Status

PS_PER_S = 10**12
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Space:
    """A memory with addresses from 0. Raises FormatError where a number cannot be."""

    name: str  # as a C identifier
    capacity_bytes: int | None = None  # None: as much as it takes
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    align_bytes: int = 1  # addresses are multiples of it, and so is the size of its arena

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise FormatError(f"memory {self.name!r}: expected a name of letters, digits and _, as in C")
        for what in ("capacity_bytes", "align_bytes"):
            value = getattr(self, what)
            if value is None and what == "capacity_bytes":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**62:
                most = " and less than 2**62" if isinstance(value, int) and value > 0 else ""
                raise FormatError(f"memory {self.name}: {what}: expected 1 byte or more{most}, got {value!r:.40}")
        for what in ("read_bytes_per_s", "write_bytes_per_s"):
            check_rate(f"memory {self.name}: {what}", getattr(self, what))

    @property
    def room_bytes(self) -> int:
        """The capacity in whole multiples of the alignment: 2**62 where there is no limit."""
        return 2**62 if self.capacity_bytes is None else self.capacity_bytes // self.align_bytes * self.align_bytes


def check_rate(where: str, rate: float | None) -> None:
    """Raises FormatError unless the rate is None or a number above 0."""
    if rate is None:
        return
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 1e-3 <= rate <= 1e18 or not math.isfinite(rate):
        raise FormatError(f"{where}: expected a number from 0.001 to 1e18 per second, got {rate!r}")


@dataclass(frozen=True, slots=True)
class EdgeBlock:
    """Bytes of one space over some steps, and the tensors that lie there."""

    tensors: tuple[int, ...]  # that share its bytes; none for a workspace
    space: int
    offset_bytes: int
    size_bytes: int
    start: int  # steps of the order, half-open
    end: int
    starts: tuple[int, ...] = ()  # each tensor's byte within the block; all 0 where left out

    def start_of(self, tensor: int) -> int:
        """The byte of the block at which a tensor of it begins."""
        return self.starts[self.tensors.index(tensor)] if self.starts else 0


@dataclass(frozen=True, slots=True)
class Move:
    """Before step `before` the bytes of block `block` have been copied to block `to`, where its tensors are from then on."""

    block: int
    to: int
    before: int


@dataclass(frozen=True)
class EdgePlan:
    """A network's order, blocks and moves, and what is promised of them."""

    graph: EdgeGraph
    spaces: tuple[Space, ...]  # the fastest first
    order: tuple[int, ...]  # nodes of the graph, as they run
    blocks: tuple[EdgeBlock, ...]
    moves: tuple[Move, ...] = ()
    macs_per_s: float | None = None  # None: multiplications take no time
    constants_bytes_per_s: float | None = None  # of flash; None: constants take no time
    dma: bool = False  # moves run beneath operators
    time_ps: int | None = None  # by the model; None where a rate is unknown
    least: int | None = None  # the space whose bytes were made least; None where that was the time
    bound: int = 0  # no plan takes less: bytes of that space, or picoseconds
    status: Status = Status.UNKNOWN  # of the whole: order, spaces, addresses and moves together

    @property
    def time_us(self) -> float | None:
        return None if self.time_ps is None else self.time_ps / 1e6

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Which operators of the network work slice by slice as one."""
        return cuts_of(self.graph)

    @property
    def extra_macs(self) -> float:
        """The share of multiplications that cuts do again: 0.0 where none is."""
        return extra_macs(self.graph)

    @cached_property
    def arena_bytes(self) -> tuple[int, ...]:
        """The bytes that each space is needed for, in whole multiples of its alignment."""
        ends = [0] * len(self.spaces)
        for block in self.blocks:
            ends[block.space] = max(ends[block.space], block.offset_bytes + block.size_bytes)
        return tuple(rounded_up(end, memory.align_bytes) for end, memory in zip(ends, self.spaces, strict=True))

    @property
    def value(self) -> int:
        """What was made least: bytes of the space `least`, or picoseconds."""
        return (self.time_ps or 0) if self.least is None else self.arena_bytes[self.least]

    @property
    def gap(self) -> float:
        """How much of it another plan might at most save, from 0 to 1."""
        return (self.value - self.bound) / self.value if self.value else 0.0

    def __repr__(self) -> str:
        return f"<EdgePlan of {self.graph.name}: {len(self.order)} operators in {', '.join(memory.name for memory in self.spaces)}>"

    def __str__(self) -> str:
        """What is promised, line by line; `lowtide edge` prints tensors, too."""
        what = f"the bytes of {self.spaces[self.least].name}" if self.least is not None else "the time"
        lines = [f"{self.graph.name}: {len(self.order)} operators; made least: {what}, {self.status.name.lower()}, gap {self.gap:.1%}"]
        if self.time_us is not None:
            lines.append(f"time {time_text(self.time_us)}, {len(self.moves)} moves")
        if self.cuts:
            lines.append(f"{len(self.cuts)} cuts, {self.extra_macs:.1%} of multiplications done again")
        for memory, needed in zip(self.spaces, self.arena_bytes, strict=True):
            room = "" if memory.capacity_bytes is None else f" of {bytes_text(memory.capacity_bytes)}"
            lines.append(f"{memory.name}: {bytes_text(needed)}{room}")
        return "\n".join(lines)


def rounded_up(nbytes: int, align_bytes: int) -> int:
    return -(-nbytes // align_bytes) * align_bytes
