"""Which part of the model a step is of: runs of steps of one module, at a depth at which there are few."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from lowtide.ir.graph import Node
from lowtide.report.chart import Mark, Scale

_MOST = 40  # runs of steps that a strip can show
_DEEPEST = 4
_NARROWEST = 0.5  # percents of the strip


def module_marks(nodes: Sequence[Node], at: Sequence[float], scale: Scale) -> tuple[Mark, ...]:
    """The runs of steps of one module, named at the greatest depth at which the strip is not too crowded."""
    found: tuple[Mark, ...] = ()
    for depth in range(1, _DEEPEST + 1):
        spans = ((name, scale.x(at[first]), scale.x(at[last])) for name, first, last in _runs(nodes, depth))
        wide = tuple(Mark(name, left=left, span=right - left) for name, left, right in spans if name and right - left > _NARROWEST)
        if found and len(wide) > _MOST:
            break
        found = wide
    return found


def _runs(nodes: Sequence[Node], depth: int) -> list[tuple[str, int, int]]:
    """(module, first step, step after the last), those without a module left out of a run that goes on."""
    names = [(step, ".".join(node.source.module.split(".")[:depth])) for step, node in enumerate(nodes) if node.source is not None]
    found = []
    for name, of in groupby(names, key=lambda pair: pair[1]):
        steps = [step for step, _ in of]
        found.append((name, steps[0], steps[-1] + 1))
    return found
