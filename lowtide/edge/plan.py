"""A plan for a network on a small device: which bytes lie where, from which step to which, and what is copied between."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.edge.graph import EdgeGraph


@dataclass(frozen=True, slots=True)
class Memory:
    """A memory of a device, with addresses from 0."""

    name: str
    capacity_bytes: int | None = None  # None for as much as it takes
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    align_bytes: int = 1  # every block starts at a multiple of it


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes of one memory over the steps [start, end) of an order, for tensors that share them."""

    tensors: tuple[int, ...]  # views and in-place results lie in their input's block
    space: int
    offset_bytes: int
    size_bytes: int
    start: int
    end: int
    starts: tuple[int, ...] = ()  # where each tensor lies within the block, in bytes; empty for all at its first


@dataclass(frozen=True, slots=True)
class Move:
    """Before step `before` the bytes of a block are copied to the block `to`, where its tensors lie from then on."""

    block: int
    to: int
    before: int


@dataclass(frozen=True)
class EdgePlan:
    """An order, a place for each block, and moves."""

    graph: EdgeGraph
    spaces: tuple[Memory, ...]  # the fastest first
    order: tuple[int, ...]  # nodes of the graph, as they run
    blocks: tuple[Block, ...]
    moves: tuple[Move, ...] = ()
