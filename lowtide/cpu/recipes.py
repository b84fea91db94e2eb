"""How constants are prepared, once: a norm with given statistics folded in, and weights in the order in which kernels read them.

Here are recipes only; `cpu.constants` follows them. A recipe counts elements, so that what is kept is known before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lowtide.ir.graph import Value


@dataclass(frozen=True, slots=True)
class Target:
    """The machine that code is made for."""

    lanes: int  # float32 in a vector
    registers: int
    threads: int = 1  # that usually run it; any number may

    def whole(self, columns: int) -> int:
        """Whole vectors among so many columns; what is left over is none, or half a vector."""
        return columns // self.lanes + (columns % self.lanes > self.lanes // 2)

    def half(self, columns: int) -> int:
        """Whether half a vector is left over."""
        return int(0 < columns % self.lanes <= self.lanes // 2)

    def width(self, columns: int) -> int:
        """Columns rounded up to half a vector."""
        return self.whole(columns) * self.lanes + self.half(columns) * (self.lanes // 2)


@dataclass(frozen=True, eq=False, slots=True)
class Norm:
    """A batch norm with given statistics: y = (x - mean) / sqrt(var + eps) * gamma + beta, for each channel."""

    gamma: Value | None
    beta: Value | None
    mean: Value
    var: Value
    eps: float


@dataclass(frozen=True, eq=False, slots=True)
class Panels:
    """A weight as panels of columns, of each group of channels: the bias, then a row for each tap (ky, kx, input channel)."""

    weight: Value  # [O, I, KH, KW] of a convolution; [K, N] of a product
    bias: Value | None
    norm: Norm | None
    groups: int
    columns: int  # of a group
    rows: int  # taps by input channels of a group
    vectors: int  # of a panel
    target: Target

    @property
    def elements(self) -> int:
        return self.groups * self.target.width(self.columns) * (self.rows + 1)


@dataclass(frozen=True, eq=False, slots=True)
class Taps:
    """A depthwise weight [C, 1, KH, KW], for each vector of channels the bias, then the taps."""

    weight: Value
    bias: Value | None
    norm: Norm | None
    channels: int
    taps: int
    target: Target

    @property
    def elements(self) -> int:
        return self.target.width(self.channels) * (self.taps + 1)


@dataclass(frozen=True, eq=False, slots=True)
class Transformed:
    """A weight [O, I, 3, 3] at all points of tiles that are `side` results wide: the bias, then for each point panels as of a product."""

    weight: Value
    bias: Value | None
    norm: Norm | None
    columns: int
    rows: int  # input channels
    side: int
    vectors: int  # of a panel
    target: Target

    @property
    def points(self) -> int:
        """Products for each tile, input channel and column."""
        return (self.side + 2) ** 2

    @property
    def bias_elements(self) -> int:
        """What stands before the panels."""
        return -(-self.target.width(self.columns) // self.target.lanes) * self.target.lanes

    @property
    def elements(self) -> int:
        return self.bias_elements + self.points * self.target.width(self.columns) * (self.rows + 1)


@dataclass(frozen=True, eq=False, slots=True)
class Plain:
    """A constant as it is, row by row, each row rounded up; with a norm its factor, or what it adds."""

    value: Value
    rows: int
    columns: int
    step: int
    norm: Norm | None = None
    part: str = ""  # of a norm: "scale" or "shift"

    @property
    def elements(self) -> int:
        return self.rows * self.step


Packed: TypeAlias = Panels | Taps | Transformed | Plain

ALIGN_ELEMENTS = 16  # of each packed constant, which is a vector of the widest kind


def offsets_of(recipes: Sequence[Packed]) -> tuple[dict[Packed, int], int]:
    """Where each constant goes, and how many elements all take, room for what may be read behind them included."""
    offsets, at = dict[Packed, int](), 0
    for recipe in recipes:
        offsets[recipe] = at
        at += -(-recipe.elements // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
    return offsets, at + 4 * ALIGN_ELEMENTS
