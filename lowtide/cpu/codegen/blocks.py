"""A block as C++: its operators' rows made by functions of their own, the window between them by blocks.hpp."""

from __future__ import annotations

from lowtide.base.narrow import there
from lowtide.cpu.codegen.text import ElementOffsets, Functors, exact, flag, listed, window_of
from lowtide.cpu.layout import stepped
from lowtide.cpu.packed import Target
from lowtide.cpu.stages import Convolution, Product, RowBlock, Windows
from lowtide.cpu.tiles import rows_beside

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
        out = f"{addresses.of(windows.out)}, {windows.out_step}"
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
    to = f"{addresses.of(last.out)} + y * {width * last.out_step}"
    return f"some_rows<{listed(arguments)}>(line, {addresses.of(last.weight)}, {name}, {to}, y * {width}, {last.out_step})"
