"""Frontiers of MAGIS's workloads as small pictures: time against memory, with what MAGIS and eviction alone reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.magis_workloads import Case
from bench.results import RESULTS

_MOST = 0.5  # of overhead that is shown
_LINES = {"recompute": "-", "swap": "--", "split": ":"}
_MOVES = {"recompute": "recomputation", "swap": "and swapping", "split": "and in parts"}
_COLOURS = ("tab:blue", "tab:cyan", "tab:orange")


def draw(frontiers: Mapping[str, Sequence[tuple[float, float]]], cases: Sequence[Case], directory: Path = RESULTS) -> Path:
    """One picture for each workload in one PNG file. Keys are "workload | network | moves". Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 7.2), dpi=80, layout="constrained")
    panels = list(figure.subplots(2, 4).flat)
    for axes, case in zip(panels, cases, strict=False):
        _panel(axes, case, frontiers)
    panels[-1].axis("off")
    panels[-1].legend(*_legend(panels), loc="center", frameon=False, fontsize=9)
    path = directory / "magis.png"
    figure.savefig(path, metadata={"Software": None})
    return path


def _panel(axes: Any, case: Case, frontiers: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    networks = [*(entry.name for entry in case.published), case.lean.name]
    for place, network in enumerate(networks):
        for moves, line in _LINES.items():
            points = frontiers.get(f"{case.name} | {network} | {moves}", [])
            if points:
                colour = _COLOURS[2] if network == case.lean.name else _COLOURS[place]
                axes.step(*zip(*points, strict=True), line, where="post", color=colour, label=_label(network, case, moves))
    for reached in case.known.magis.values():
        axes.plot(reached.share, min(reached.overhead, _MOST), "r^" if reached.overhead > _MOST else "rs", label="MAGIS, as released")
    for share, overhead in case.known.eviction.items():
        axes.plot(share, overhead, "kx", label="eviction alone")
    axes.set(title=case.name, xlim=(0, 1), ylim=(-0.01, _MOST + 0.01), xlabel="peak, of eager PyTorch's", ylabel="additional time")
    axes.grid(alpha=0.3)


def _label(network: str, case: Case, moves: str) -> str:
    which = (
        "lean, as MAGIS's code has it" if network == case.lean.name else "as published" if network == case.published[0].name else "variant"
    )
    return f"{which}: {_MOVES[moves]}"


def _legend(panels: Sequence[Any]) -> tuple[list[Any], list[str]]:
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)
