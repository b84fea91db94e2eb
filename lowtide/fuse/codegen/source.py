"""The source of a network: a function for each stage, and one that runs them all, each thread its share, with barriers between.

takes   stages, where the arena's buffers and the packed constants lie
leaves  text that needs nothing but kernels.hpp; all names in it are made here
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowtide.fuse.codegen.maps import map_body
from lowtide.fuse.layout import Buffer, Lay
from lowtide.fuse.stages import Convolution, Epilogue, Map, Pad, Product, Rows, Stage, Windows
from lowtide.fuse.tiles import tile_of
from lowtide.ir.packed import Packed, Panels, Plain, Taps, Target

ENTRY = "lowtide_network"
_CACHED_BYTES = 128 * 1024  # of rows that stay near while all panels pass them
_NEAR_BYTES = 24 * 1024  # of panels that stay nearest while all rows pass them
_WEIGHTS_BYTES = 256 * 1024  # beyond that panels are passed once, and rows again and again


@dataclass(frozen=True)
class Addresses:
    """Where things are, in elements."""

    buffers: Mapping[Buffer, int]
    packed: Mapping[Packed, int]

    def of(self, place: Lay | Packed) -> str:
        """A pointer to the first element."""
        if isinstance(place, (Panels, Taps, Plain)):
            return f"run.at[1] + {self.packed[place]}"
        if place.buffer.position is not None:
            return f"run.at[{2 + place.buffer.position}] + {place.offset}"
        return f"run.at[0] + {self.buffers[place.buffer] + place.offset}"


def source_of(stages: Sequence[Stage], addresses: Addresses, target: Target) -> str:
    """The whole text."""
    parts = ['#include "kernels.hpp"', f'static_assert(L == {target.lanes}, "made for other vectors");']
    for at, stage in enumerate(stages):
        parts += _stage(at, stage, addresses, target)
    parts += [f'extern "C" void {ENTRY}(const Run* its) {{', "  const Run& run = *its;"]
    parts += [f"  stage{at}(run); barrier(run);" for at in range(len(stages))]
    return "\n".join([*parts, "}", ""])


def _stage(at: int, stage: Stage, addresses: Addresses, target: Target) -> list[str]:
    lines = [] if isinstance(stage, (Map, Pad)) else _functor(at, stage.epilogue)
    names = ", ".join(node.op.removeprefix("aten.").split(".")[0] for node in stage.nodes)
    call = _call(stage, addresses, target)
    body = call if isinstance(call, list) else [*_filled(at, stage.epilogue, addresses), f"  {call};"]
    if isinstance(stage, Pad):
        body = [f"  {call};"]
    return [*lines, f"static void stage{at}(const Run& run) {{  // {names}", *body, "}"]


def _functor(at: int, epilogue: Epilogue) -> list[str]:
    """What becomes of a vector before it is stored."""
    pointers = [f"  const float* p{each};" for each in range(len(epilogue.operands))]
    loads = [
        f"    vec<N> o{each} = load<N>(p{each} + row * {operand.step} + column);"
        if operand.across
        else f"    vec<N> o{each} = all<N>(p{each}[row * {operand.step}]);"
        for each, operand in enumerate(epilogue.operands)
    ]
    lines = [f"    {line}" for line in epilogue.lines]
    head = "  template <int N> ALWAYS vec<N> operator()(vec<N> v, long row, int column) const {"
    return [f"struct E{at} {{", *pointers, head, *loads, *lines, f"    return {epilogue.result};", "  }", "};"]


def _filled(at: int, epilogue: Epilogue, addresses: Addresses) -> list[str]:
    pointers = ", ".join(addresses.of(operand.place) for operand in epilogue.operands)
    return [f"  E{at} e{{{pointers}}};"]


def _call(stage: Stage, addresses: Addresses, target: Target) -> str | list[str]:
    if isinstance(stage, Map):
        return map_body(stage, addresses.of)
    if isinstance(stage, Product):
        return _product(stage, addresses, target)
    if isinstance(stage, Convolution):
        return _convolution(stage, addresses, target)
    if isinstance(stage, Windows):
        return _windows(stage, addresses, target)
    return _pad(stage, addresses) if isinstance(stage, Pad) else _rows(stage, addresses)


def _flag(value: object) -> str:
    return "true" if value else "false"


def _exact(stage: Product | Convolution | Windows) -> str:
    """Whether a row's last vector is stored in part."""
    return _flag(not stage.out.has_room)


def _product(stage: Product, addresses: Addresses, target: Target) -> str:
    columns = stage.weight.columns
    tile = tile_of(stage.rows, columns, target)
    packed_bytes, row_bytes = stage.weight.elements * 4, stage.k * 4
    block = tile.rows if packed_bytes <= _NEAR_BYTES else max(1, _CACHED_BYTES // row_bytes // tile.rows) * tile.rows
    panels = packed_bytes > (stage.k + columns) * stage.rows * 4
    taps = f"Taps<1, 1, {stage.k}, 0, 0, 1, {stage.a_step}>"
    arguments = (taps, stage.rows, columns, *tile, block, _flag(panels), _exact(stage))
    places = ", ".join([addresses.of(stage.a), addresses.of(stage.weight), "e", addresses.of(stage.out), str(stage.out_step)])
    return f"product<{_listed(arguments)}>(run, {places})"


def _convolution(stage: Convolution, addresses: Addresses, target: Target) -> str:
    n, _, oh, ow = stage.out.shape
    image, channel, line, pixel = stage.a.stride
    (kh, kw), (sh, sw), (dh, dw) = stage.geometry.kernel, stage.geometry.stride, stage.geometry.dilation
    weight = stage.weight
    inner = weight.rows // (kh * kw)
    taps = f"Taps<{_listed((kh, kw, inner, line * dh, pixel * dw, channel, pixel * sw))}>"
    tile = tile_of(ow, weight.columns, target)
    panels = weight.elements * 4 > _WEIGHTS_BYTES
    beside = weight.groups > 1 and target.width(weight.columns) != weight.columns  # the next group's channels lie right behind
    flags = _flag(panels), "true" if beside else _exact(stage)
    arguments = (taps, n, image, oh, ow, line * sh, weight.columns, weight.groups, inner * channel, *tile, *flags)
    places = ", ".join([addresses.of(stage.a), addresses.of(weight), "e", addresses.of(stage.out), str(stage.out_step)])
    return f"convolution<{_listed(arguments)}>(run, {places})"


def _windows(stage: Windows, addresses: Addresses, target: Target) -> str:
    n, c, ih, iw = stage.a.shape
    oh, ow = stage.out.shape[2:]
    its = stage.geometry
    pixel = stage.a.rows() or 0
    window = f"Window<{_listed((*its.kernel, *its.stride, *its.dilation, *its.padding, ih, iw, oh, ow, pixel))}>"
    parts = target.whole(c) + target.half(c)
    by_channels = parts >= 8 and oh < 32
    beside = _beside(ow, its.kernel[1], target)
    arguments = (stage.kind, window, n, ih * iw * pixel, c, beside, _flag(by_channels), _exact(stage))
    weight = "nullptr" if stage.weight is None else addresses.of(stage.weight)
    return f"windows<{_listed(arguments)}>(run, {addresses.of(stage.a)}, {weight}, e, {addresses.of(stage.out)}, {stage.out_step})"


def _beside(ow: int, kw: int, target: Target) -> int:
    """How many results of a row are made at once."""
    most = max(1, min(8 if target.registers >= 32 else 4, target.registers - kw - 2))
    inner = max(1, ow - (kw - 1))
    return min(range(1, min(most, inner) + 1), key=lambda beside: (-(-inner // beside), beside))


def _rows(stage: Rows, addresses: Addresses) -> str:
    columns = stage.out.shape[1] if stage.kind == "mean" else stage.a.shape[-1]
    arguments: tuple[object, ...] = (stage.rows, columns, stage.a_step)
    name, more = "norm_rows", f", {stage.eps!r}f"
    if stage.kind == "mean":
        name, more = "mean_of_rows", ""
        arguments = (stage.images, stage.a.stride[0] if stage.images > 1 else 0, *arguments)
    return f"{name}<{_listed(arguments)}>(run, {addresses.of(stage.a)}, e, {addresses.of(stage.out)}, {stage.out_step}{more})"


def _pad(stage: Pad, addresses: Addresses) -> str:
    n, c, h, w = stage.a.shape
    planar = stage.out.stride[1] != 1 or c == 1
    image, *strides = stage.a.stride
    arguments = (n, image, c, h, w, *stage.padding, *strides, _flag(planar), 0 if planar else stage.out.stride[3])
    return f"pad<{_listed(arguments)}>(run, {addresses.of(stage.a)}, {addresses.of(stage.out)})"


def _listed(arguments: Sequence[object]) -> str:
    return ", ".join(str(each) for each in arguments)
