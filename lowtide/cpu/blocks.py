"""Which stages run as one, row by row (AGO, sections III-B2 and V): stages into stages, of which some are blocks.

    takes   stages in an order that is right, and the body that they compute
    leaves  the same work; what is between the parts of a block is in no buffer

A block is legal where a window slides over what a product or a convolution makes, or a product reads what a window makes, nothing else
reads what is between, and a row's ring is small enough for a thread's stack. Which of them are made is said by `choosing`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lowtide.cpu.layout import Buffer, stepped
from lowtide.cpu.stages import Convolution, Product, RowBlock, Stage, Windows

_MOST_BYTES = 384 * 1024  # of a thread's stack
_KINDS = ("Weighted", "Largest")


def alternatives(stages: Sequence[Stage]) -> list[tuple[RowBlock, ...]]:
    """The legal blocks around each window that there are any around, the largest first; windows in program order."""
    readers = Counter(layout.buffer for stage in stages for layout in stage.reads)
    makers = {stage.out.buffer: stage for stage in stages}
    users = {layout.buffer: stage for stage in stages for layout in stage.reads}
    windows = (stage for stage in stages if isinstance(stage, Windows) and stage.kind in _KINDS)
    return [blocks for each in windows if (blocks := tuple(_blocks(each, makers, users, readers)))]


def with_blocks(stages: Sequence[Stage], joined: Sequence[int]) -> tuple[Stage, ...]:
    """Stages with blocks in the place of their last parts: of each window's alternatives the one of that number, from 1; 0 for none."""
    by_last: dict[Stage, RowBlock] = {}  # by the last part
    for blocks, number in zip(alternatives(stages), joined, strict=False):
        if 0 < number <= len(blocks):
            by_last[blocks[number - 1].parts[-1]] = blocks[number - 1]
    taken = {part for block in by_last.values() for part in block.parts}
    return tuple(by_last.get(stage, stage) for stage in stages if stage not in taken or stage in by_last)


def _blocks(windows: Windows, makers: dict[Buffer, Stage], users: dict[Buffer, Stage], readers: Counter[Buffer]) -> list[RowBlock]:
    """The blocks around a window, the largest first."""
    before, after = makers.get(windows.a.buffer), users.get(windows.out.buffer)
    first = before if isinstance(before, (Product, Convolution)) and _leads(before, windows, readers) else None
    last = after if isinstance(after, Product) and _follows(after, windows, readers) else None
    both = [RowBlock(first, windows, last)] if first is not None and last is not None else []
    one = [RowBlock(first, windows, None)] if first is not None else []
    two = [RowBlock(None, windows, last)] if last is not None else []
    return [each for each in (*both, *one, *two) if _stack_bytes(each) <= _MOST_BYTES]


def _leads(first: Product | Convolution, windows: Windows, readers: Counter[Buffer]) -> bool:
    """Whether a window reads all of what a stage makes as that lies, one image, and nobody else does."""
    alone = readers[first.out.buffer] == 1 and first.out.buffer.is_own and windows.a.offset == first.out.offset == 0
    whole = windows.a.shape[0] == 1 and windows.a.rows() == first.out_step and _elements(first) == pixels(windows.a.shape)
    if isinstance(first, Convolution):
        return alone and whole and first.weight.groups == 1
    return alone and whole


def _elements(first: Product | Convolution) -> tuple[int, int]:
    if isinstance(first, Product):
        return first.rows, first.weight.columns
    n, c, h, w = first.out.shape
    return n * h * w, c


def pixels(shape: Sequence[int]) -> tuple[int, int]:
    """How many an image has, and how many channels."""
    n, c, h, w = shape
    return n * h * w, c


def _follows(last: Product, windows: Windows, readers: Counter[Buffer]) -> bool:
    """Whether a product reads all of what a window makes, and nobody else does."""
    out = windows.out
    alone = readers[out.buffer] == 1 and out.buffer.is_own and last.a.offset == out.offset == 0
    return alone and out.shape[0] == 1 and last.a_step == windows.out_step and (last.rows, last.k) == pixels(out.shape)


def _stack_bytes(block: RowBlock) -> int:
    its, step = block.windows, stepped(block.windows.a.shape[1])
    span = (its.geometry.kernel[0] - 1) * its.geometry.dilation[0] + 1
    ring = span * its.a.shape[3] * (its.a.rows() or step) if block.first is not None else 0
    return 4 * (ring + (its.out.shape[3] * step if block.last is not None else 0))
