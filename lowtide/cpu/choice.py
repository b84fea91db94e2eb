"""Which blocks are made (AGO, sections V and VI): a model says, and where it cannot tell, what was measured.

    takes   stages, and what is constant in the body that they compute
    leaves  by window that there are blocks around: which of them, the first being 1; 0 for none

For convolutions the model is that of `model.py`; for pooling a block wins where more is between than a core's own cache holds.
Where the model finds a block and its stages to be about as fast, it is worth measuring.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from lowtide.cpu.layout import stepped
from lowtide.cpu.model import BlockTimes, block_times, core_here
from lowtide.cpu.stages import KernelStage, RowBlock, alternatives, pixels
from lowtide.ir.graph import Value

_NEAR_BYTES = 256 * 1024  # of what is between, that a core's own cache holds beside all else
_CLOSE = 0.15  # the model cannot tell kernels apart that it finds to be so near to each other

KernelAlternative = tuple[KernelStage, ...]  # stages that do the same work as others
# Of variants, and which of them the model chose, the one that is made: 0 for the first.
Fastest = Callable[[Sequence[KernelAlternative], int], int]


@dataclass(frozen=True)
class Choices:
    """What there is to choose among, and what the model says of it."""

    blocks: list[tuple[RowBlock, ...]]  # by window
    times: dict[RowBlock, BlockTimes]  # of convolutions
    winners: Collection[RowBlock]

    @classmethod
    def of(cls, stages: Sequence[KernelStage], fixed: Collection[Value]) -> Choices:
        blocks, core = alternatives(stages), core_here()
        deep = [block for each in blocks for block in each if block.windows.kind == "Weighted"]
        times = {block: its for block in deep if (its := block_times(block, fixed, core)) is not None}
        large = [block for each in blocks for block in each if block not in deep and _between_bytes(block) > _NEAR_BYTES]
        return cls(blocks, times, {*large, *_leanest(blocks, times)})

    def numbers(self, fastest: Fastest) -> tuple[int, ...]:
        taken: set[KernelStage] = set()
        numbers: list[int] = []
        for blocks in self.blocks:
            free = [0, *(number for number, block in enumerate(blocks, 1) if not any(part in taken for part in block.parts))]
            number = next((each for each in free[1:] if blocks[each - 1] in self.winners), 0)
            if any(self.is_close(blocks[each - 1]) for each in free[1:]):
                number = free[fastest(variants(blocks, free), free.index(number))]
            numbers.append(number)
            taken.update(blocks[number - 1].parts if number else ())
        return tuple(numbers)

    def is_close(self, block: RowBlock) -> bool:
        """Whether the model may be wrong about a block."""
        if block.windows.kind == "Weighted":
            return block in self.times and abs(self.times[block].gain) <= _CLOSE
        return _NEAR_BYTES / 2 < _between_bytes(block) < 2 * _NEAR_BYTES


def _leanest(windows: Sequence[Sequence[RowBlock]], times: dict[RowBlock, BlockTimes]) -> tuple[RowBlock, ...]:
    """The blocks that save most together: those around two windows may want the one stage between these."""
    none: tuple[float, tuple[RowBlock, ...]] = (0.0, ())  # what is saved, by which blocks
    best: dict[RowBlock | None, tuple[float, tuple[RowBlock, ...]]] = {None: none}  # by the last window's block
    for blocks in windows:
        before, best = best, {None: max(best.values(), key=_saved_us)}
        for block in (each for each in blocks if each in times):
            apart = [choice for last, choice in before.items() if last is None or not any(part in last.parts for part in block.parts)]
            saved_us, chosen = max(apart, key=_saved_us)
            best[block] = saved_us + times[block].apart_us - times[block].joined_us, (*chosen, block)
    return max(best.values(), key=_saved_us)[1]


def _saved_us(choice: tuple[float, tuple[RowBlock, ...]]) -> float:
    return choice[0]


def variants(blocks: Sequence[RowBlock], numbers: Sequence[int]) -> list[KernelAlternative]:
    """The ways to do the work of all blocks around a window: none of them, or one and what it lacks."""
    parts = max((blocks[number - 1].parts for number in numbers if number), key=len)
    return [tuple(_joined(parts, blocks[number - 1])) if number else tuple(parts) for number in numbers]


def _joined(parts: Sequence[KernelStage], block: RowBlock) -> Iterator[KernelStage]:
    for part in parts:
        if part is block.parts[-1]:
            yield block
        elif part not in block.parts:
            yield part


def _between_bytes(block: RowBlock) -> int:
    return sum(4 * stepped(part.out.shape[1]) * pixels(part.out.shape)[0] for part in block.parts[:-1])
