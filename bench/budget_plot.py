"""Peak against time of a step, a small picture for each model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.results import RESULTS

_SERIES = (  # how the setting starts, colour, mark, line
    ("eager", "black", "*", ""),
    ("checkpoint", "tab:red", "s", ""),
    ("aot_eager", "tab:orange", "^", ""),
    ("inductor", "tab:green", "v", ""),
    ("lowtide arena", "tab:cyan", ".", ""),
    ("lowtide", "tab:blue", "o", "-"),
)


def plot(rows: Sequence[Mapping[str, Any]], name: str = "budget") -> None:
    """Write `bench/results/NAME.png`: peak in MiB against time as a multiple of eager's."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row["model"] for row in rows))
    columns = min(4, len(models))
    figure = Figure(figsize=(4.2 * columns, 3.4 * -(-len(models) // columns)), layout="constrained")
    for number, model in enumerate(models):
        axes = figure.add_subplot(-(-len(models) // columns), columns, number + 1)
        axes.set(title=model, xlabel="peak above what the caller holds, MiB", ylabel="time of a step, eager's = 1")
        for start, colour, mark, line in _SERIES:
            points = sorted(_points(rows, model, start))
            if points:
                axes.plot(*zip(*points, strict=True), color=colour, marker=mark, linestyle=line, label=start, markersize=5, linewidth=1)
        axes.grid(alpha=0.3)
        if number == 0:
            axes.legend(fontsize=8)
    figure.savefig(RESULTS / f"{name}.png", dpi=110)


def _points(rows: Sequence[Mapping[str, Any]], model: str, start: str) -> list[tuple[float, float]]:
    return [
        (row["peak_bytes"] / 2**20, 1.0 if row["setting"] == "eager" else row["wall_to_eager"])
        for row in rows
        if row["model"] == model and row.get("wall_ms") is not None and _series(row["setting"]) == start
    ]


def _series(setting: str) -> str:
    return next(start for start, *_ in _SERIES if setting.startswith(start))
