"""The processes that train one model together, as a capture takes them: how many, and what they exchange."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """A process group. Nothing here differs between its ranks, as the graph is to be the same on all of them."""

    group: str  # its name, which collectives call it by
    size: int
    bucket_bytes: int  # gradients travel together up to this size
    broadcasts_buffers: bool  # those of rank 0 count, at the start of each step
    shard: str = ""  # what each rank holds its own part of: "optimizer", "gradients"
    over_gloo: bool = False  # whether tensors on a CPU travel by gloo, of which it is known what is slow
