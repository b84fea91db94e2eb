"""How constants are prepared, once: a norm with given statistics folded in, and weights in the order in which kernels read them.

A recipe counts elements, so that what is kept is known before. `pack` follows recipes: constants as kernels read them, in one
aligned block. Norms are folded in double precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch

from lowtide.ir.graph import Value

Tensors = Mapping[Value, torch.Tensor]
_POINTS = {2: (0.0, 1.0, -1.0), 4: (0.0, 0.75, -0.75, 1.5, -1.5)}  # by the side of a tile, as winograd.hpp has them, without infinity


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


def aligned(elements: int) -> torch.Tensor:
    """Zeros, on a boundary of 64 bytes."""
    block = torch.zeros(elements + ALIGN_ELEMENTS, dtype=torch.float32, device="cpu")
    skip = -block.data_ptr() // 4 % ALIGN_ELEMENTS
    return block[skip : skip + elements]


def pack(recipes: Sequence[Packed], tensors: Tensors, block: torch.Tensor) -> None:
    """Write all constants into a block as long as `offsets_of` says."""
    for recipe, at in offsets_of(recipes)[0].items():
        _write(recipe, tensors, block[at : at + recipe.elements])


def _write(recipe: Packed, tensors: Tensors, into: torch.Tensor) -> None:
    if isinstance(recipe, Plain):
        _write_plain(recipe, tensors, into)
        return
    weight, bias = tensors[recipe.weight], None if recipe.bias is None else tensors[recipe.bias]
    rows = weight.reshape(weight.shape[0], -1).T if weight.dim() == 4 else weight  # [.., columns], as the weight lies
    if isinstance(recipe, (Panels, Transformed)) and weight.dim() == 4:
        rows = weight.permute(2, 3, 1, 0).reshape(-1, weight.shape[0])
    count = rows.shape[1]
    both = torch.cat([rows.new_zeros(1, count) if bias is None else bias.reshape(1, count), rows])
    if recipe.norm is not None:
        both = _folded(both, recipe.norm, tensors)
    if isinstance(recipe, Taps):
        _write_parts(both, [recipe.target.lanes] * recipe.target.whole(count), recipe, into)
        return
    if isinstance(recipe, Transformed):
        _write_transformed(both, recipe, into)
        return
    groups = both.reshape(both.shape[0], recipe.groups, recipe.columns)
    share = into.numel() // recipe.groups
    for group in range(recipe.groups):
        _write_parts(groups[:, group], _panels(recipe), recipe, into[group * share : (group + 1) * share])


def _write_transformed(both: torch.Tensor, recipe: Transformed, into: torch.Tensor) -> None:
    """The bias, then the weight as a polynomial at each point, in double precision."""
    into[: both.shape[1]] = both[0]
    evaluate = _evaluation(_POINTS[recipe.side])
    weight = both[1:].double().reshape(3, 3, recipe.rows, recipe.columns)
    lines = [_combined(weight, factors) for factors in evaluate]
    share = (into.numel() - recipe.bias_elements) // recipe.points
    for at in range(recipe.points):
        rows = _combined(lines[at // len(evaluate)], evaluate[at % len(evaluate)]).float()
        begin = recipe.bias_elements + at * share
        _write_parts(torch.cat([rows.new_zeros(1, recipe.columns), rows]), _panels(recipe), recipe, into[begin : begin + share])


def _combined(parts: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    """The sum of parts times factors: an operator for whole products would load what takes megabytes."""
    total = torch.zeros_like(parts[0])
    for part, factor in zip(parts, factors, strict=True):
        if factor:
            total += part * factor
    return total


def _evaluation(points: Sequence[float]) -> list[list[float]]:
    """[points and infinity, 3]: what a polynomial of three coefficients is there, over what interpolation would divide by."""
    scales = [prod(point - other for other in points if other != point) for point in points]
    return [*([point**k / scale for k in range(3)] for point, scale in zip(points, scales, strict=True)), [0.0, 0.0, 1.0]]


def _panels(recipe: Panels | Transformed) -> list[int]:
    """The columns of each panel, but for half a vector at the end."""
    whole, lanes = recipe.target.whole(recipe.columns), recipe.target.lanes
    return [min(recipe.vectors, whole - at) * lanes for at in range(0, whole, recipe.vectors)]


def _write_parts(both: torch.Tensor, widths: Sequence[int], recipe: Panels | Taps | Transformed, into: torch.Tensor) -> None:
    """[rows, columns] part by part, with zeros behind the last column."""
    columns, target = both.shape[1], recipe.target
    wide = both.new_zeros(both.shape[0], target.width(columns))
    wide[:, :columns] = both
    widths = list(widths)
    if target.half(columns):
        half = target.lanes // 2
        joins = not isinstance(recipe, Taps) and bool(widths)
        widths = [*widths[:-1], widths[-1] + half] if joins else [*widths, half]
    column = at = 0
    for width in widths:
        size = both.shape[0] * width
        into[at : at + size] = wide[:, column : column + width].reshape(-1)
        column, at = column + width, at + size


def _folded(both: torch.Tensor, norm: Norm, tensors: Tensors) -> torch.Tensor:
    """A bias and a weight, whose columns are channels, with a norm behind them."""
    scale, shift = _affine(norm, tensors)
    wide = both.double() * scale
    wide[0] += shift
    return wide.float()


def _affine(norm: Norm, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (tensors[norm.var].double() + norm.eps).rsqrt()
    if norm.gamma is not None:
        scale = scale * tensors[norm.gamma].double()
    shift = -tensors[norm.mean].double() * scale
    return scale, shift if norm.beta is None else shift + tensors[norm.beta].double()


def _write_plain(recipe: Plain, tensors: Tensors, into: torch.Tensor) -> None:
    value = tensors[recipe.value]
    if recipe.norm is not None:
        value = _affine(recipe.norm, tensors)[recipe.part == "shift"]
    into.view(recipe.rows, recipe.step)[:, : recipe.columns] = value.reshape(recipe.rows, recipe.columns)
