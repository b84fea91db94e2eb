"""README's picture: memory over one training step, as eager PyTorch runs it and as lowtide plans it.

    python -m bench.picture

Writes `docs/memory-light.png` and `docs/memory-dark.png`. The step is captured on the meta device and nothing is run: bytes are those of
tensors, without operators' temporaries; time is by the roofline of an RTX 3090. Needs matplotlib (`pip install 'lowtide[plot]'`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import lowtide
from bench.in_values import in_values
from bench.model_paper_step import captured_step
from bench.models import get
from bench.models.workload import plain_sgd
from lowtide.cost.memory import order_problem, simulate
from lowtide.cost.presets import preset
from lowtide.ir.graph import Graph

MODEL, BATCH_SIZE, TITLE = "vit_b_16", 2, "ViT-B/16, batch 2, SGD: memory over one training step"
MACHINE = "rtx3090"
LIMIT = "60%"
DOCS = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True)
class Curve:
    """Memory over time."""

    name: str
    at_us: NDArray[np.float64]  # [n] when each operator starts
    footprint_bytes: NDArray[np.int64]  # [n] while it runs
    resident_bytes: int

    @classmethod
    def of(cls, name: str, graph: Graph, order: Sequence[int], *, eager: bool = False) -> Curve:
        """An order, played through."""
        problem = order_problem(graph, eager=eager)
        node_us = np.array(preset(MACHINE).graph_us(graph))[list(order)]
        return cls(name, node_us.cumsum() - node_us, np.asarray(simulate(problem, order).footprint_bytes), int(problem.resident_bytes))


@dataclass(frozen=True)
class Theme:
    """Colours of one of the two pictures."""

    name: str
    text: str
    curves: tuple[str, str, str]


THEMES = (
    Theme("light", "#1f2328", ("#8c959f", "#0969da", "#1a7f37")),
    Theme("dark", "#e6edf3", ("#7d8590", "#58a6ff", "#3fb950")),
)


def main() -> None:
    curves = planned()
    for curve in curves:
        print(f"{curve.name}: {curve.footprint_bytes.max() / 2**20:,.1f} MiB, {curve.at_us[-1] / 1e3:.1f} ms")
    for theme in THEMES:
        print(draw(curves, theme))


def planned() -> tuple[Curve, ...]:
    """Eager's own order with all gradients held until the end, the order of least peak, and the limit."""
    captured = captured_step(get(MODEL), BATCH_SIZE)
    eager = dataclasses.replace(captured.graph, outputs=(*captured.graph.outputs, *captured.held_storages.values))
    settings: dict[str, Any] = {"simulate": MACHINE, "swap": False, "progress": False}
    curves = [Curve.of("eager PyTorch", eager, range(len(eager.nodes)), eager=True)]
    for name, asked in (("lowtide, no time lost", {}), (f'lowtide, memory="{LIMIT}"', {"memory": LIMIT})):
        work = get(MODEL).build(BATCH_SIZE, "meta")
        plan = lowtide.optimize(
            work.model, work.batch, loss=work.loss, optimizer=plain_sgd(work.model), **in_values(**settings, **asked)
        ).plan
        curves.append(Curve.of(name, plan.graph, plan.order))
    return tuple(curves)


def draw(curves: Sequence[Curve], theme: Theme, directory: Path = DOCS) -> Path:
    """One of the two. The same plans give the same file."""
    return draw_curves(curves, theme, TITLE, directory / f"memory-{theme.name}.png")


def draw_curves(curves: Sequence[Curve], theme: Theme, title: str, path: Path) -> Path:
    """Memory over time, in one PNG file. The same curves give the same file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"text.color": theme.text, "font.size": 11}):
        figure = Figure(figsize=(8.4, 3.6), layout="constrained")
        axes = figure.subplots()
        for curve, colour in zip(curves, theme.curves, strict=True):
            _add(axes, curve, colour)
        held = curves[0].resident_bytes / 2**20
        axes.axhline(held, color=theme.text, linewidth=0.8, linestyle=":")
        axes.text(0, held, " parameters and batch, which you hold", va="top", fontsize=9)
        axes.set(title=title, xlabel="milliseconds (roofline of an RTX 3090)", ylabel="memory, MiB", ylim=(0, None), xlim=(0, None))
        axes.tick_params(colors=theme.text)
        axes.xaxis.label.set_color(theme.text)
        axes.yaxis.label.set_color(theme.text)
        for side, spine in axes.spines.items():
            spine.set(color=theme.text, visible=side in ("left", "bottom"))
        axes.legend(loc="lower right", frameon=False, labelcolor=theme.text)
        figure.savefig(path, transparent=True, dpi=150, metadata={"Software": None})
    return path


def _add(axes: Any, curve: Curve, colour: str) -> None:
    level = curve.footprint_bytes / 2**20
    axes.step(curve.at_us / 1e3, level, where="post", color=colour, linewidth=1.3, label=f"{curve.name}: {level.max():,.0f} MiB")
    axes.fill_between(curve.at_us / 1e3, level, step="post", color=colour, alpha=0.12, linewidth=0)


if __name__ == "__main__":
    main()
