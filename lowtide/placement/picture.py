"""A placement as a picture: time to the right, addresses upwards, a rectangle for each buffer, coloured by its size."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.base.files import write_whole
from lowtide.base.messages import bytes_text, need
from lowtide.errors import FormatError
from lowtide.placement.base import Placement
from lowtide.problems.placement import Ints, PlaceProblem

FORMATS = ("png", "svg", "pdf")
_OUTLINED = 3_000  # buffers: with more, outlines would cover the colours, and vectors make files that nobody can open
_NAMED = 60  # buffers with room for their names, if at all
_INCHES = (11, 7)
_DPI = 150
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def check_picture(path: str | os.PathLike[str]) -> None:
    """Whether a picture can be drawn here: raises ImportError where matplotlib is not installed, FormatError for another suffix."""
    if Path(path).suffix.lower().removeprefix(".") not in FORMATS:
        raise FormatError(f"{os.fspath(path)}: expected a picture's name that ends in {', '.join('.' + each for each in FORMATS)}")
    need("matplotlib", f"a picture ({Path(path).name})", "plot")


def draw(problem: PlaceProblem, placement: Placement, path: str | os.PathLike[str], *, capacity_bytes: int | None = None) -> None:
    """Draws a placement with its arena, its lower bound and the capacity, in the format that the path ends in.

    Of more than a few thousand buffers the rectangles are pixels also in an SVG or PDF, without outlines. Raises ImportError where
    matplotlib is not installed, FormatError for another suffix, OSError where the file cannot be written.
    """
    check_picture(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.add_subplot()
    top_bytes = max(placement.arena_bytes, placement.lower_bound_bytes, capacity_bytes or 0, 1)
    unit, label = next((unit, label) for unit, label in _UNITS if top_bytes >= unit)
    _rectangles(figure, axes, problem, placement, unit)
    _lines(figure, axes, placement, capacity_bytes, unit)
    steps = problem.live_bytes[0]
    axes.set_xlim(*((int(steps[0]), int(steps[-1])) if len(steps) > 1 else (0, 1)))
    axes.set_ylim(0, 1.02 * top_bytes / unit)
    axes.set_xlabel("step")
    axes.set_ylabel(f"offset, {label}")
    axes.set_title(f"{problem.buffer_count:,} buffers, {placement.status.name.lower()}, by {placement.solver}")
    save_figure(figure, path)


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure of matplotlib in the format that the path ends in. Raises OSError."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=Path(path).suffix.lower().removeprefix("."), dpi=_DPI)
    write_whole(path, drawn.getvalue())


def _rectangles(figure: Any, axes: Any, problem: PlaceProblem, placement: Placement, unit: int) -> None:
    shown = np.flatnonzero((problem.size_bytes > 0) & (problem.start < problem.end)) if placement.offsets else np.array([], np.intp)
    if not len(shown):
        return
    size, start, end = problem.size_bytes[shown], problem.start[shown], problem.end[shown]
    low = np.asarray(placement.offsets, np.int64)[shown] / unit
    high = low + size / unit
    corners = [(start, low), (end, low), (end, high), (start, high)]
    rectangles = _collection(np.stack([np.column_stack(corner) for corner in corners], axis=1), size)
    axes.add_collection(rectangles)
    _scale(figure, axes, rectangles)
    if len(shown) <= _NAMED:
        names = [problem.names[buffer] for buffer in shown.tolist()]
        _names(axes, names, (start + end) / 2, (low + high) / 2, rectangles.norm(size))


def _collection(corners: Any, size: Ints) -> Any:
    """All buffers as one: a patch for each would take minutes for tens of thousands. corners: [n, 4, 2]."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import LogNorm

    outlined = len(size) <= _OUTLINED
    return PolyCollection(
        corners,
        array=size.astype(float),
        norm=LogNorm(vmin=int(size.min()), vmax=max(int(size.max()), int(size.min()) + 1)),
        cmap="viridis",
        edgecolors="white" if outlined else "face",  # a buffer of less than a pixel is still seen
        linewidths=0.3,
        rasterized=not outlined,
    )


def _scale(figure: Any, axes: Any, rectangles: Any) -> None:
    """What the colours say, in powers of two."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    scale = figure.colorbar(rectangles, ax=axes, label="size", pad=0.01, ticks=LogLocator(base=2, numticks=12))
    scale.ax.yaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: bytes_text(round(nbytes))))
    scale.ax.minorticks_off()


def _names(axes: Any, names: Sequence[str], x: Any, y: Any, shades: Any) -> None:
    for name, at_x, at_y, shade in zip(names, x, y, shades, strict=True):
        colour = "black" if shade > 0.6 else "white"
        axes.text(at_x, at_y, ascii(name)[1:-1], ha="center", va="center", fontsize=7, color=colour, clip_on=True, parse_math=False)


def _lines(figure: Any, axes: Any, placement: Placement, capacity_bytes: int | None, unit: int) -> None:
    """Where the arena ends, what is proven, and what there is."""
    lines = [("arena", placement.arena_bytes, "black", "-")] if placement.offsets else []
    lines.append(("lower bound", placement.lower_bound_bytes, "tab:red", "--"))
    if capacity_bytes is not None:
        lines.append(("capacity", capacity_bytes, "tab:blue", ":"))
    for label, nbytes, colour, style in lines:
        axes.axhline(nbytes / unit, color=colour, linestyle=style, linewidth=1, label=f"{label} {bytes_text(nbytes)}")
    figure.legend(loc="outside lower center", ncols=len(lines), frameon=False, fontsize=9)
