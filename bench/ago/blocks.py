"""Other ways to choose which operators share a kernel, for comparison: in the place of what `lowtide.cpu.trial` says."""

from __future__ import annotations

from typing import Any

from lowtide.cpu.network import StagedBody
from lowtide.cpu.stages import KernelStage, alternatives


def none(staged: StagedBody, *_: Any) -> tuple[int, ...]:
    """No blocks: AGO's ablation NI."""
    return (0,) * len(alternatives(staged.stages))


def all_legal(staged: StagedBody, *_: Any) -> tuple[int, ...]:
    """Around each window the largest block that no other has a stage of: AGO's ablation NR."""
    taken: set[KernelStage] = set()
    numbers = []
    for blocks in alternatives(staged.stages):
        free = (number for number, block in enumerate(blocks, 1) if not taken.intersection(block.parts))
        numbers.append(next(free, 0))
        taken.update(blocks[numbers[-1] - 1].parts if numbers[-1] else ())
    return tuple(numbers)
