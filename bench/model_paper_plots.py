"""Figures 5 to 8 of MODeL's paper, drawn of our rows: bars by network for each batch size, and the means of the paper as lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.results import RESULTS

_BAR = 0.38
_COLOURS = ("tab:blue", "tab:orange")


@dataclass(frozen=True)
class Figure:
    """What one figure shows."""

    number: int
    column: str
    title: str
    percent: bool
    paper: Mapping[int, float]  # the paper's mean by batch size, in the axis' unit
    beside: str = ""  # a column whose largest value the title tells


FIGURES = (
    Figure(5, "saving", "Peak memory saved against PyTorch (%)", True, {1: 31.4, 32: 32.8}),
    Figure(6, "planning_s", "Planning time: order and addresses (s)", False, {}),
    Figure(7, "pytorch_fragmentation", "Fragmentation of PyTorch's allocator (%)", True, {1: 7.8, 32: 21.3}, "fragmentation"),
    Figure(8, "ordering_saving", "Ideal peak memory saved by order alone (%)", True, {1: 23.9, 32: 11.7}),
)


def draw(rows: Sequence[Mapping[str, Any]], folder: str, directory: Path = RESULTS) -> list[Path]:
    """Every figure for each kind of inputs, as PNG files in a folder under `directory`. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure as Canvas

    into = directory / folder
    into.mkdir(parents=True, exist_ok=True)
    files = []
    for inputs in dict.fromkeys(row["inputs"] for row in rows):
        for figure in FIGURES:
            canvas = Canvas(figsize=(7.5, 3.2), dpi=90, layout="constrained")
            _bars(canvas.subplots(), figure, [row for row in rows if row["inputs"] == inputs])
            path = into / f"figure{figure.number}_{inputs}.png"
            canvas.savefig(path, metadata={"Software": None})
            files.append(path)
    return files


def _bars(axes: Any, figure: Figure, rows: Sequence[Mapping[str, Any]]) -> None:
    names, batch_sizes = list(dict.fromkeys(row["network"] for row in rows)), list(dict.fromkeys(row["batch_size"] for row in rows))
    for place, batch_size in enumerate(batch_sizes):
        heights = {row["network"]: row[figure.column] * (100 if figure.percent else 1) for row in rows if row["batch_size"] == batch_size}
        colour = _COLOURS[place % len(_COLOURS)]
        left = [names.index(name) + (place - (len(batch_sizes) - 1) / 2) * _BAR for name in heights]
        axes.bar(left, list(heights.values()), _BAR, color=colour, label=f"batch {batch_size}")
        if batch_size in figure.paper:
            axes.axhline(figure.paper[batch_size], color=colour, linestyle="--", linewidth=1, label=f"MODeL's mean, batch {batch_size}")
    beside = f"; of lowtide's addresses: at most {100 * max(row[figure.beside] for row in rows):.1f}" if figure.beside else ""
    axes.set_title(figure.title + beside, fontsize=10)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(axis="y", linewidth=0.3)
    axes.figure.legend(loc="outside lower center", ncols=4, fontsize=7)
