"""What a generated network does, one stage after the other: each is split among threads, and ends where all have ended.

A stage reads and writes places (`layout.Layout`) and packed constants; its epilogue is what becomes of a result before it is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from lowtide.cpu.layout import Layout
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


@dataclass(frozen=True, eq=False, slots=True)
class Product:
    """out[rows, n] = a[rows, k] by a packed weight."""

    a: Layout
    a_step: int
    rows: int
    k: int
    weight: Panels
    out: Layout
    out_step: int
    epilogue: Epilogue
    nodes: tuple[Node, ...] = ()

    @property
    def reads(self) -> tuple[Layout, ...]:
        return self.a, *self.epilogue.reads


@dataclass(frozen=True, eq=False, slots=True)
class Convolution:
    """A convolution of a whole image that has its padding around it."""

    a: Layout  # [N, C, H, W], padded
    geometry: Geometry
    weight: Panels
    out: Layout
    out_step: int
    epilogue: Epilogue
    nodes: tuple[Node, ...] = ()

    @property
    def reads(self) -> tuple[Layout, ...]:
        return self.a, *self.epilogue.reads


@dataclass(frozen=True, eq=False, slots=True)
class Winograd:
    """A convolution of 3 x 3 on tiles of the image, each transformed so that a point of it takes one product."""

    a: Layout  # [N, C, H, W]
    padding: tuple[int, int]
    weight: Transformed
    block: int  # tiles at a time
    by_panels: bool  # what threads share; else tiles
    out: Layout
    out_step: int
    epilogue: Epilogue
    nodes: tuple[Node, ...] = ()

    @property
    def reads(self) -> tuple[Layout, ...]:
        return self.a, *self.epilogue.reads


@dataclass(frozen=True, eq=False, slots=True)
class Pad:
    """Zeros put around an image."""

    a: Layout
    padding: tuple[int, int]
    out: Layout
    nodes: tuple[Node, ...] = ()
    epilogue: Epilogue = field(default=Epilogue())

    @property
    def reads(self) -> tuple[Layout, ...]:
        return (self.a,)


@dataclass(frozen=True, eq=False, slots=True)
class Windows:
    """A depthwise convolution, or pooling: channel by channel over a window."""

    kind: str  # the C++ name of what is done in a window
    a: Layout
    geometry: Geometry
    weight: Taps | None
    out: Layout
    out_step: int
    epilogue: Epilogue
    nodes: tuple[Node, ...] = ()

    @property
    def reads(self) -> tuple[Layout, ...]:
        return self.a, *self.epilogue.reads


@dataclass(frozen=True, eq=False, slots=True)
class RowReduction:
    """A reduction: the mean of all rows of each image, or each row normed by itself, or its softmax."""

    kind: str  # "mean", "norm", "softmax", or "safe" for a softmax that is 0 where all is masked
    a: Layout
    a_step: int
    images: int
    rows: int  # of an image
    out: Layout
    out_step: int
    epilogue: Epilogue
    eps: float = 0.0
    nodes: tuple[Node, ...] = ()

    @property
    def reads(self) -> tuple[Layout, ...]:
        return self.a, *self.epilogue.reads


@dataclass(frozen=True, eq=False, slots=True)
class Batched:
    """out[b, m, n] = a[b, m, k] by other[b, k, n], both from other stages."""

    a: Layout
    other: Layout  # whose columns lie side by side
    out: Layout
    out_step: int
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


Stage: TypeAlias = Product | Convolution | Winograd | Pad | Windows | RowReduction | Batched | Attention | Map | RowBlock
