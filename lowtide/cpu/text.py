"""Pieces of source that every kind of stage needs: addresses, epilogues as functors, lists of template arguments.

What threads share of each stage: rows, or columns; so that each finds near what it has made itself.

What another core has written lately comes from there, at a fraction of the rate of a cache that all share. So a window over an image, which
computes little, goes the way of what made the image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowtide.cpu.layout import Buffer, Layout
from lowtide.cpu.recipes import Packed, Panels, Plain, Taps, Target, Transformed
from lowtide.cpu.stages import Convolution, Epilogue, KernelStage, Product, Windows, Winograd
from lowtide.cpu.tiles import by_columns as columns_are_shared
from lowtide.cpu.tiles import by_panels

_FEWEST_ROWS = 4  # that are shared
_SHARED_ROWS = 32  # of an image that nobody here has made


def by_columns(stages: Sequence[KernelStage], target: Target) -> set[KernelStage]:
    """The stages of which threads share columns, or channels."""
    columned: set[KernelStage] = set()
    makers: dict[Buffer, KernelStage] = {}
    for stage in stages:
        if _shares_columns(stage, makers, columned, target):
            columned.add(stage)
        makers[stage.out.buffer] = stage
    return columned


def _shares_columns(stage: KernelStage, makers: dict[Buffer, KernelStage], columned: set[KernelStage], target: Target) -> bool:
    if isinstance(stage, Product):
        return by_panels(stage.rows, stage.k, stage.weight.columns, target)
    if isinstance(stage, Convolution):
        return columns_are_shared(stage.weight.elements * 4)
    if isinstance(stage, Winograd):
        return stage.by_panels
    if not isinstance(stage, Windows):
        return False
    images, channels, rows, _ = stage.out.shape
    if target.whole(channels) + target.half(channels) < 2:
        return False
    maker = makers.get(stage.a.buffer)
    if images * rows < _FEWEST_ROWS:
        return True
    return rows < _SHARED_ROWS if maker is None else maker in columned


@dataclass(frozen=True)
class ElementOffsets:
    """Where things are, in elements."""

    buffers: Mapping[Buffer, int]
    packed: Mapping[Packed, int]

    def of(self, place: Layout | Packed) -> str:
        if isinstance(place, (Panels, Taps, Transformed, Plain)):
            return f"run.at[1] + {self.packed[place]}"
        if place.buffer.position is not None:
            return f"run.at[{2 + place.buffer.position}] + {place.offset}"
        return f"run.at[0] + {self.buffers[place.buffer] + place.offset}"


class Functors:
    """What becomes of vectors before they are stored, as C++. Epilogues of the same text share a type, so that a compiler meets it once."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, ...], str] = {}

    @property
    def lines(self) -> list[str]:
        """All types."""
        return [line for body, name in self._names.items() for line in (f"struct {name} {{", *body, "};")]

    def filled(self, name: str, epilogue: Epilogue, addresses: ElementOffsets) -> list[str]:
        """A variable of an epilogue's type, with what it reads."""
        functor = self._names.setdefault(tuple(_functor(epilogue)), f"E{len(self._names)}")
        pointers = ", ".join(addresses.of(operand.place) for operand in epilogue.operands)
        return [f"  {functor} {name}{{{pointers}}};"]


def _functor(epilogue: Epilogue) -> list[str]:
    pointers = [f"  const float* p{each};" for each in range(len(epilogue.operands))]
    loads = [
        f"    vec<N> o{each} = load<N>(p{each} + row * {operand.step} + column);"
        if operand.across
        else f"    vec<N> o{each} = all<N>(p{each}[row * {operand.step}]);"
        for each, operand in enumerate(epilogue.operands)
    ]
    lines = [f"    {line}" for line in epilogue.lines]
    head = "  template <int N> ALWAYS vec<N> operator()(vec<N> v, long row, int column) const {"
    return [*pointers, head, *loads, *lines, f"    return {epilogue.result};", "  }"]


def flag(value: object) -> str:
    return "true" if value else "false"


def exact(stage: Product | Convolution | Windows | Winograd) -> str:
    """Whether a row's last vector is stored in part."""
    return flag(not stage.out.has_room)


def window_of(stage: Windows, target: Target) -> tuple[str, int]:
    """A window's type, and how many of its results are made side by side."""
    its = stage.geometry
    ih, iw, oh, ow = *stage.a.shape[2:], *stage.out.shape[2:]
    window = f"Window<{listed((*its.kernel, *its.stride, *its.dilation, *its.padding, ih, iw, oh, ow, stage.a.rows() or 0))}>"
    return window, _beside(ow, its.kernel[1], target)


def _beside(ow: int, kw: int, target: Target) -> int:
    """How many results of a row are made at once."""
    most = max(1, min(8 if target.registers >= 32 else 4, target.registers - kw - 2))
    inner = max(1, ow - (kw - 1))
    return min(range(1, min(most, inner) + 1), key=lambda beside: (-(-inner // beside), beside))


def listed(arguments: Sequence[object]) -> str:
    return ", ".join(str(each) for each in arguments)
