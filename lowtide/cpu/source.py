"""The source of a network: a function for each stage, and one that runs them all, each thread its share, with barriers between.

takes   stages, where the arena's buffers and the packed constants lie
leaves  text that needs nothing but the templates; all names in it are made here

Attention, batched products and softmax are calls of the templates in attention.hpp. Of a block, functions of its own make the rows of each
operator, and blocks.hpp holds the window between them.

What threads share of each stage is its rows, or columns, so that each finds near what it has made itself. What another core has written
lately comes from there, at a fraction of the rate of a cache that all share. So a window over an image, which computes little, goes the
way of what made the image.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from lowtide.cpu.expressions import map_body
from lowtide.cpu.layout import Buffer, Layout, stepped
from lowtide.cpu.recipes import Packed, Panels, Plain, Taps, Target, Transformed
from lowtide.cpu.stages import (
    Attention,
    Batched,
    Convolution,
    Epilogue,
    KernelStage,
    Map,
    Pad,
    Product,
    RowBlock,
    RowReduction,
    Windows,
    Winograd,
)
from lowtide.cpu.tiles import by_columns as columns_are_shared
from lowtide.cpu.tiles import by_panels, rows_beside
from lowtide.errors import there

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
    window = f"Window<{listed((*its.kernel, *its.stride, *its.dilation, *its.padding, ih, iw, oh, ow, stage.a_step))}>"
    return window, _beside(ow, its.kernel[1], target)


def _beside(ow: int, kw: int, target: Target) -> int:
    """How many results of a row are made at once."""
    most = max(1, min(8 if target.registers >= 32 else 4, target.registers - kw - 2))
    inner = max(1, ow - (kw - 1))
    return min(range(1, min(most, inner) + 1), key=lambda beside: (-(-inner // beside), beside))


def listed(arguments: Sequence[object]) -> str:
    return ", ".join(str(each) for each in arguments)


_KINDS = {"Weighted": "RingWeighted", "Largest": "RingLargest"}


def block(stage: RowBlock, addresses: ElementOffsets, target: Target, functors: Functors) -> list[str]:
    lines = [line for part, each in enumerate(stage.parts) for line in functors.filled(f"e{part}", each.epilogue, addresses)]
    return [*lines, *_body(stage, addresses, target)]


def _body(stage: RowBlock, addresses: ElementOffsets, target: Target) -> list[str]:
    windows = stage.windows
    channels, step = windows.a.shape[1], stepped(windows.a.shape[1])
    window, beside = window_of(windows, target)
    middle = "e0" if stage.first is None else "e1"
    weight = "nullptr" if windows.weight is None else addresses.of(windows.weight)
    lines: list[str] = []
    if stage.first is not None:
        lines.append(f"  auto expand = [&](long y, float* to) {{ {_expand(stage.first, windows, addresses, target)}; }};")
    if stage.last is not None:
        lines.append(f"  auto finish = [&](const float* line, long y) {{ {_finish(stage, addresses, target)}; }};")
    kind = _KINDS[windows.kind]
    if stage.last is None:
        arguments: tuple[object, ...] = (kind, window, channels, beside, exact(windows))
        out = f"{addresses.of(windows.out)}, {windows.out.step}"
        return [*lines, f"  from_ring<{listed(arguments)}>(run, expand, {weight}, {middle}, {out});"]
    arguments = (kind, window, channels, step, beside)
    if stage.first is None:
        return [*lines, f"  over_image<{listed(arguments)}>(run, {addresses.of(windows.a)}, {weight}, {middle}, finish);"]
    return [*lines, f"  through_ring<{listed(arguments)}>(run, expand, {weight}, {middle}, finish);"]


def _expand(first: Product | Convolution, windows: Windows, addresses: ElementOffsets, target: Target) -> str:
    """Row `y` of the image that the window slides over."""
    width, step = windows.a.shape[3], windows.a.rows()
    if isinstance(first, Product):
        taps, line = f"Taps<1, 1, {first.k}, 0, 0, 1, {first.a_step}>", width * first.a_step
    else:
        _, channel, line_step, pixel = first.a.stride
        (kh, kw), (sh, sw), (dh, dw) = first.geometry.kernel, first.geometry.stride, first.geometry.dilation
        inner = first.weight.rows // (kh * kw)
        taps, line = f"Taps<{listed((kh, kw, inner, line_step * dh, pixel * dw, channel, pixel * sw))}>", line_step * sh
    tile = rows_beside(width, first.weight.columns, first.weight.vectors, target)
    arguments = (taps, width, first.weight.columns, *tile, flag(False))
    return (
        f"some_rows<{listed(arguments)}>({addresses.of(first.a)} + y * {line}, {addresses.of(first.weight)}, e0, to, y * {width}, {step})"
    )


def _finish(stage: RowBlock, addresses: ElementOffsets, target: Target) -> str:
    """What becomes of row `y` of the window's results."""
    windows, last, name = stage.windows, stage.last, f"e{len(stage.parts) - 1}"
    last = there(last)
    width, columns = windows.out.shape[3], last.weight.columns
    tile = rows_beside(width, columns, last.weight.vectors, target)
    taps = f"Taps<1, 1, {last.k}, 0, 0, 1, {stepped(windows.a.shape[1])}>"
    arguments = (taps, width, columns, *tile, exact(last))
    to = f"{addresses.of(last.out)} + y * {width * last.out.step}"
    return f"some_rows<{listed(arguments)}>(line, {addresses.of(last.weight)}, {name}, {to}, y * {width}, {last.out.step})"


def attention(stage: Attention, addresses: ElementOffsets) -> str:
    b, h, q, d = stage.query.shape
    places = [stage.query, stage.key, stage.value, stage.mask or stage.query, stage.out]
    extents = (b, h, q, stage.key.shape[3], d, stage.value.shape[3], flag(stage.is_causal), flag(stage.mask is not None))
    steps = [f"Steps<{listed(_moving(place))}>" for place in places]
    pointers = ", ".join(addresses.of(place) for place in places)
    return f"attention<{listed((*extents, *steps))}>(run, {pointers}, {stage.scale!r}f)"


def batched(stage: Batched, addresses: ElementOffsets) -> str:
    n, m, k = stage.a.shape
    arguments = (n, m, k, stage.other.shape[2], *_moving(stage.a), *_moving(stage.other)[:2])
    pointers = ", ".join([addresses.of(stage.a), addresses.of(stage.other), "e", addresses.of(stage.out), str(stage.out.step)])
    return f"batched<{listed(arguments)}>(run, {pointers})"


def softmax(stage: RowReduction, addresses: ElementOffsets) -> str:
    arguments = (stage.rows, stage.a.shape[-1], stage.a_step, flag(stage.kind == "safe"))
    return f"softmax_rows<{listed(arguments)}>(run, {addresses.of(stage.a)}, e, {addresses.of(stage.out)}, {stage.out.step})"


def _moving(layout: Layout) -> list[int]:
    """Steps along all dimensions; none along those of one element."""
    return [0 if size == 1 else step for size, step in zip(layout.shape, layout.stride, strict=True)]


ENTRY = "lowtide_network"
SHARES = 8  # of what a compiler does
_WEIGHTS: Mapping[type, int] = {
    RowBlock: 6,
    Winograd: 4,
    Convolution: 3,
    Product: 3,
    Attention: 3,
    Windows: 2,
}  # what compilers take, roughly
_HERE = (
    "#ifndef LOWTIDE_PARTS", "#define LOWTIDE_PARTS 1", "#define LOWTIDE_PART 0", "#endif",
    "#define HERE(share) ((share) % LOWTIDE_PARTS == LOWTIDE_PART)",
)  # fmt: skip
_HIDDEN = '__attribute__((visibility("hidden")))'
SingleStage: TypeAlias = Product | Convolution | Winograd | Pad | Windows | RowReduction | Batched | Attention | Map  # all but blocks
_CACHED_BYTES = 128 * 1024  # of rows that stay near while all panels pass them
_NEAR_BYTES = 24 * 1024  # of panels that stay nearest while all rows pass them


_NOWHERE = ElementOffsets(defaultdict(int), defaultdict(int))


def source_of(stages: Sequence[KernelStage], addresses: ElementOffsets, target: Target) -> str:
    """The whole text. Compiled with LOWTIDE_PARTS and LOWTIDE_PART defined it is one of several parts, which are linked then."""
    return text_of(stages, by_columns(stages, target), addresses, target, [range(len(stages))])


def text_of(
    stages: Sequence[KernelStage],
    columns: Collection[KernelStage],
    addresses: ElementOffsets,
    target: Target,
    runs: Sequence[Sequence[int]],
) -> str:
    """The text of several networks of the same stages: each runs some of them. The first has the usual name, the others numbers behind."""
    functors = Functors()
    functions = [_stage(f"stage{at}", stage, Context(addresses, target, stage in columns), functors) for at, stage in enumerate(stages)]
    parts = [*(f'#include "{name}.hpp"' for name in ("blocks", "attention", "winograd"))]
    parts += [f'static_assert(L == {target.lanes}, "made for other vectors");', *_HERE]
    parts += [*functors.lines, *(f"{_HIDDEN} void stage{at}(const Run& run);" for at in range(len(stages)))]
    for share, function in zip(shares(stages, functions), functions, strict=True):
        parts += [f"#if HERE({share})", *function, "#endif"]
    parts.append("#if HERE(0)")
    for number, run in enumerate(runs):
        parts += [f'extern "C" void {entry(number)}(const Run* its) {{', "  const Run& run = *its;"]
        parts += [*(f"  stage{at}(run); barrier(run);" for at in run[:-1]), *(f"  stage{at}(run);" for at in run[-1:]), "}"]
    return "\n".join([*parts, "#endif", ""])


def entry(number: int) -> str:
    return f"{ENTRY}_{number}" if number else ENTRY


def kernel_text(stage: KernelStage, by_columns: bool, target: Target) -> str:
    """All that a stage's kernel depends on, whatever it is called and wherever it reads and writes."""
    functors = Functors()
    function = _stage("", stage, Context(_NOWHERE, target, by_columns), functors)
    return "\n".join([*functors.lines, _kind(function)])


def shares(stages: Sequence[KernelStage], functions: Sequence[Sequence[str]]) -> list[int]:
    """Which share of the compiler's work each stage is of. Stages that are the same but for what they read are of one share."""
    weights = {_kind(function): _WEIGHTS.get(type(stage), 1) for stage, function in zip(stages, functions, strict=True)}
    loads, share = [0] * SHARES, dict[str, int]()
    for kind in sorted(weights, key=lambda kind: -weights[kind]):  # ties stay in program order
        share[kind] = loads.index(min(loads))
        loads[share[kind]] += weights[kind]
    return [share[_kind(function)] for function in functions]


def _kind(function: Sequence[str]) -> str:
    """A stage's function without its name and without addresses."""
    return re.sub(r"run\.at\[\d+\] \+ \d+", "", "\n".join(function[1:]))


class Context(NamedTuple):
    """What a stage's text depends on beside the stage."""

    addresses: ElementOffsets
    target: Target
    by_columns: bool  # whether threads share columns; else rows


def _stage(name: str, stage: KernelStage, context: Context, functors: Functors) -> list[str]:
    names = ", ".join(node.op.removeprefix("aten.").split(".")[0] for node in stage.nodes)
    head = f"void {name}(const Run& run) {{  // {names}"
    if isinstance(stage, RowBlock):
        return [head, *block(stage, context.addresses, context.target, functors), "}"]
    call = _call(stage, context)
    if isinstance(call, list):
        return [head, *call, "}"]
    given = [] if isinstance(stage, (Pad, Attention)) else functors.filled("e", stage.epilogue, context.addresses)
    return [head, *given, f"  {call};", "}"]


def _call(stage: SingleStage, context: Context) -> str | list[str]:
    addresses = context.addresses
    if isinstance(stage, Map):
        return map_body(stage, addresses.of)
    if isinstance(stage, Product):
        return _product(stage, *context)
    if isinstance(stage, Convolution):
        return _convolution(stage, *context)
    if isinstance(stage, Winograd):
        return _winograd(stage, *context)
    if isinstance(stage, Windows):
        return _windows(stage, *context)
    if isinstance(stage, Batched):
        return batched(stage, addresses)
    if isinstance(stage, Attention):
        return attention(stage, addresses)
    return _pad(stage, addresses) if isinstance(stage, Pad) else _rows(stage, addresses)


def _product(stage: Product, addresses: ElementOffsets, target: Target, panels: bool) -> str:
    columns = stage.weight.columns
    tile = rows_beside(stage.rows, columns, stage.weight.vectors, target, once=True)
    packed_bytes, row_bytes = stage.weight.elements * 4, stage.k * 4
    block = tile.rows if packed_bytes <= _NEAR_BYTES else max(1, _CACHED_BYTES // row_bytes // tile.rows) * tile.rows
    taps = f"Taps<1, 1, {stage.k}, 0, 0, 1, {stage.a_step}>"
    arguments = (taps, stage.rows, columns, *tile, block, flag(panels), exact(stage))
    places = ", ".join([addresses.of(stage.a), addresses.of(stage.weight), "e", addresses.of(stage.out), str(stage.out.step)])
    return f"product<{listed(arguments)}>(run, {places})"


def _convolution(stage: Convolution, addresses: ElementOffsets, target: Target, panels: bool) -> str:
    n, _, oh, ow = stage.out.shape
    image, channel, line, pixel = stage.a.stride
    (kh, kw), (sh, sw), (dh, dw) = stage.geometry.kernel, stage.geometry.stride, stage.geometry.dilation
    weight = stage.weight
    inner = weight.rows // (kh * kw)
    taps = f"Taps<{listed((kh, kw, inner, line * dh, pixel * dw, channel, pixel * sw))}>"
    tile = rows_beside(ow, weight.columns, weight.vectors, target)
    beside = weight.groups > 1 and target.width(weight.columns) != weight.columns  # the next group's channels lie right behind
    flags = flag(panels), "true" if beside else exact(stage)
    arguments = (taps, n, image, oh, ow, line * sh, weight.columns, weight.groups, inner * channel, *tile, *flags)
    places = ", ".join([addresses.of(stage.a), addresses.of(weight), "e", addresses.of(stage.out), str(stage.out.step)])
    return f"convolution<{listed(arguments)}>(run, {places})"


def _winograd(stage: Winograd, addresses: ElementOffsets, target: Target, panels: bool) -> str:
    n, _, ih, iw = stage.a.shape
    weight = stage.weight
    tiled = f"Tiled<{listed((weight.side, n, weight.rows, stage.a_step, ih, iw, *stage.padding, stage.block))}>"
    tile = rows_beside(stage.block, weight.columns, weight.vectors, target)
    places = ", ".join([addresses.of(stage.a), addresses.of(weight), "e", addresses.of(stage.out), str(stage.out.step)])
    return f"winograd<{listed((tiled, weight.columns, *tile, flag(panels), exact(stage)))}>(run, {places})"


def _windows(stage: Windows, addresses: ElementOffsets, target: Target, by_channels: bool) -> str:
    n, c, ih, iw = stage.a.shape
    pixel = stage.a_step
    window, beside = window_of(stage, target)
    arguments = (stage.kind, window, n, ih * iw * pixel, c, beside, flag(by_channels), exact(stage))
    weight = "nullptr" if stage.weight is None else addresses.of(stage.weight)
    return f"windows<{listed(arguments)}>(run, {addresses.of(stage.a)}, {weight}, e, {addresses.of(stage.out)}, {stage.out.step})"


def _rows(stage: RowReduction, addresses: ElementOffsets) -> str:
    if stage.kind in ("softmax", "safe"):
        return softmax(stage, addresses)
    columns = stage.a.shape[1] if stage.kind == "mean" else stage.a.shape[-1]
    arguments: tuple[object, ...] = (stage.rows, columns, stage.a_step)
    name, more = "norm_rows", f", {stage.eps!r}f"
    if stage.kind == "mean":
        name, more = "mean_of_rows", ""
        arguments = (stage.images, stage.a.stride[0] if stage.images > 1 else 0, *arguments)
    return f"{name}<{listed(arguments)}>(run, {addresses.of(stage.a)}, e, {addresses.of(stage.out)}, {stage.out.step}{more})"


def _pad(stage: Pad, addresses: ElementOffsets) -> str:
    n, c, h, w = stage.a.shape
    planar = stage.out.stride[1] != 1 or c == 1
    image, *strides = stage.a.stride
    arguments = (n, image, c, h, w, *stage.padding, *strides, flag(planar), 0 if planar else stage.out.stride[3])
    return f"pad<{listed(arguments)}>(run, {addresses.of(stage.a)}, {addresses.of(stage.out)})"
