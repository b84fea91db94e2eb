"""What a generated network does, one stage after the other: each is split among threads, and ends where all have ended.

A stage reads and writes places (`layout.Layout`) and packed constants; its epilogue is what becomes of a result before it is stored.

Which stages run as one, row by row (AGO, sections III-B2 and V): stages into stages, of which some are blocks.

    takes   stages in an order that is right, and the body that they compute
    leaves  the same work; what is between the parts of a block is in no buffer

A block is legal where a window slides over what a product or a convolution makes, or a product reads what a window makes, nothing else
reads what is between, and a row's ring is small enough for a thread's stack. Which of them are made is said by `trial`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from lowtide.cpu.layout import Buffer, Layout, stepped
from lowtide.cpu.recipes import Packed, Panels, Taps, Transformed
from lowtide.ir.graph import Node


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that an epilogue reads: at row * step + channel * across."""

    place: Layout | Packed
    step: int
    across: int  # 1, or 0 for one number a row


@dataclass(frozen=True, slots=True)
class Epilogue:
    """C++ on the vector `v`; `o0`, `o1`, .. are the operands' vectors there."""

    lines: tuple[str, ...] = ()
    result: str = "v"
    operands: tuple[Operand, ...] = ()

    @property
    def reads(self) -> tuple[Layout, ...]:
        return tuple(operand.place for operand in self.operands if isinstance(operand.place, Layout))


@dataclass(frozen=True, slots=True)
class Geometry:
    """A window over an image."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


class _OneInput:
    """A stage of one input, beside what its epilogue reads."""

    __slots__ = ()
    a: Layout
    epilogue: Epilogue

    @property
    def reads(self) -> tuple[Layout, ...]:
        return self.a, *self.epilogue.reads

    @property
    def a_step(self) -> int:
        """From row to row of what it reads; 0 where that is no rows."""
        return self.a.rows() or 0


@dataclass(frozen=True, eq=False, slots=True)
class Product(_OneInput):
    """out[rows, n] = a[rows, k] by a packed weight."""

    a: Layout
    rows: int
    k: int
    weight: Panels
    out: Layout
    epilogue: Epilogue
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Convolution(_OneInput):
    """A convolution of a whole image that has its padding around it."""

    a: Layout  # [N, C, H, W], padded
    geometry: Geometry
    weight: Panels
    out: Layout
    epilogue: Epilogue
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Winograd(_OneInput):
    """A convolution of 3 x 3 on tiles of the image, each transformed so that a point of it takes one product."""

    a: Layout  # [N, C, H, W]
    padding: tuple[int, int]
    weight: Transformed
    block: int  # tiles at a time
    by_panels: bool  # what threads share; else tiles
    out: Layout
    epilogue: Epilogue
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Pad(_OneInput):
    a: Layout
    padding: tuple[int, int]
    out: Layout
    nodes: tuple[Node, ...] = ()
    epilogue: Epilogue = field(default=Epilogue())


@dataclass(frozen=True, eq=False, slots=True)
class Windows(_OneInput):
    """A depthwise convolution, or pooling: channel by channel over a window."""

    kind: str  # the C++ name of what is done in a window
    a: Layout
    geometry: Geometry
    weight: Taps | None
    out: Layout
    epilogue: Epilogue
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class RowReduction(_OneInput):
    """A reduction: the mean of all rows of each image, or each row normed by itself, or its softmax."""

    kind: str  # "mean", "norm", "softmax", or "safe" for a softmax that is 0 where all is masked
    a: Layout
    images: int
    rows: int  # of an image
    out: Layout
    epilogue: Epilogue
    eps: float = 0.0
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Batched:
    """out[b, m, n] = a[b, m, k] by other[b, k, n], both from other stages."""

    a: Layout
    other: Layout  # whose columns lie side by side
    out: Layout
    epilogue: Epilogue
    nodes: tuple[Node, ...] = ()

    @property
    def reads(self) -> tuple[Layout, ...]:
        return self.a, self.other, *self.epilogue.reads


@dataclass(frozen=True, eq=False, slots=True)
class Attention:
    """softmax(scale * query by key + mask) by value, a few rows of scores at a time; no scores are in a buffer."""

    query: Layout  # [B, H, queries, features]
    key: Layout  # [B, H, features, keys], keys side by side
    value: Layout  # [B, H, keys, features]
    mask: Layout | None  # [B, H, queries, keys]
    is_causal: bool
    scale: float
    out: Layout
    nodes: tuple[Node, ...] = ()
    epilogue: Epilogue = field(default=Epilogue())

    @property
    def reads(self) -> tuple[Layout, ...]:
        return self.query, self.key, self.value, *(() if self.mask is None else (self.mask,))


@dataclass(frozen=True, eq=False, slots=True)
class Map:
    """Element by element: `lines` on the vectors `x0`, `x1`, .. of the inputs, which have the shape of the result."""

    inputs: tuple[Layout | Packed, ...]
    strides: tuple[tuple[int, ...], ...]  # by input
    lines: tuple[str, ...]
    result: str
    out: Layout
    nodes: tuple[Node, ...] = ()
    epilogue: Epilogue = field(default=Epilogue())

    @property
    def reads(self) -> tuple[Layout, ...]:
        return tuple(each for each in self.inputs if isinstance(each, Layout))


@dataclass(frozen=True, eq=False, slots=True)
class RowBlock:
    """Several operators as one, row by row: what comes first, a window over that, and a product; one of first and last may be missing."""

    first: Product | Convolution | None
    windows: Windows
    last: Product | None
    epilogue: Epilogue = field(default=Epilogue())

    @property
    def parts(self) -> tuple[Product | Convolution | Windows, ...]:
        return tuple(each for each in (self.first, self.windows, self.last) if each is not None)

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(node for each in self.parts for node in each.nodes)

    @property
    def out(self) -> Layout:
        return self.parts[-1].out

    @property
    def reads(self) -> tuple[Layout, ...]:
        """What it reads but constants, and what is between its parts."""
        between = {each.out.buffer for each in self.parts[:-1]}
        return tuple(layout for each in self.parts for layout in each.reads if layout.buffer not in between)


KernelStage: TypeAlias = Product | Convolution | Winograd | Pad | Windows | RowReduction | Batched | Attention | Map | RowBlock


_MOST_BYTES = 384 * 1024  # of a thread's stack
_KINDS = ("Weighted", "Largest")


def alternatives(stages: Sequence[KernelStage]) -> list[tuple[RowBlock, ...]]:
    """The legal blocks around each window that there are any around, the largest first; windows in program order."""
    readers = Counter(layout.buffer for stage in stages for layout in stage.reads)
    makers = {stage.out.buffer: stage for stage in stages}
    users = {layout.buffer: stage for stage in stages for layout in stage.reads}
    windows = (stage for stage in stages if isinstance(stage, Windows) and stage.kind in _KINDS)
    return [blocks for each in windows if (blocks := tuple(_blocks(each, makers, users, readers)))]


def with_blocks(stages: Sequence[KernelStage], joined: Sequence[int]) -> tuple[KernelStage, ...]:
    """Stages with blocks in the place of their last parts: of each window's alternatives the one of that number, from 1; 0 for none."""
    by_last: dict[KernelStage, RowBlock] = {}  # by the last part
    for blocks, number in zip(alternatives(stages), joined, strict=False):
        if 0 < number <= len(blocks):
            by_last[blocks[number - 1].parts[-1]] = blocks[number - 1]
    taken = {part for block in by_last.values() for part in block.parts}
    return tuple(by_last.get(stage, stage) for stage in stages if stage not in taken or stage in by_last)


def _blocks(
    windows: Windows, makers: dict[Buffer, KernelStage], users: dict[Buffer, KernelStage], readers: Counter[Buffer]
) -> list[RowBlock]:
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
    whole = windows.a.shape[0] == 1 and windows.a.rows() == first.out.step and _elements(first) == pixels(windows.a.shape)
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
    return alone and out.shape[0] == 1 and last.a_step == windows.out.step and (last.rows, last.k) == pixels(out.shape)


def _stack_bytes(block: RowBlock) -> int:
    its, step = block.windows, stepped(block.windows.a.shape[1])
    span = (its.geometry.kernel[0] - 1) * its.geometry.dilation[0] + 1
    ring = span * its.a.shape[3] * (its.a.rows() or step) if block.first is not None else 0
    return 4 * (ring + (its.out.shape[3] * step if block.last is not None else 0))
