"""The page: one file that holds all it shows, asks no network, and escapes every name that it was given.

Which part of the model a step is of: runs of steps of one module, at a depth at which there are few.

It tells of single tensors, of what was evicted, and of what memory buys.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from lowtide.base.files import template, write_whole
from lowtide.base.messages import bytes_text, less_text, op_text, time_text
from lowtide.ir.graph import Node
from lowtide.plan.contents import Contents
from lowtide.plan.snapshot import LiveTensor, kind_text, source_text
from lowtide.plan.summary import one_line, snapshot_line, splits_of, summarize
from lowtide.report.chart import Chart, Course, Mark, Scale, addresses, begins, curve, stack

_PAGES = Path(__file__).parent / "pages"
_MOST_ROWS, _MOST_SPANS = 200, 4
_LONGEST = 120  # of a name that a page shows


@dataclass(frozen=True)
class Frontier:
    """What memory buys: time against bytes, of all that was found best at something."""

    path: str
    points: tuple[Mark, ...]
    chosen: Mark
    plans: tuple[tuple[int, float], ...]  # peak, time
    scale: Scale


def tensor_rows(tensors: Sequence[LiveTensor]) -> list[list[object]]:
    """For the page's script: name, bytes, kind, dtype and shape, origin, first step, end (exclusive)."""
    return [
        [_short(each.name), each.nbytes, each.kind.value, each.dtype_and_shape, _short(each.made_by), each.start, each.end]
        for each in tensors
    ]


def step_rows(course: Course) -> list[list[object]]:
    """For the page's script: what runs at each step, and what memory it finds."""
    pairs = zip(course.nodes, course.timeline.footprint_bytes, strict=True)
    return [[op_text(node.op), _short(source_text(node.source)), nbytes] for node, nbytes in pairs]


def frontier(plan: Contents) -> Frontier | None:
    """None where no limit was asked for, or nothing is to choose."""
    report = plan.cost_report
    if report is None or len(report.frontier) < 2:
        return None
    points = sorted({*report.frontier, (plan.peak_bytes, report.time_us)})
    slowest, largest_bytes = max(us for _, us in points), max(nbytes for nbytes, _ in points)
    scale = Scale(slowest * 1.05, round(largest_bytes * 1.1), by_time=True)
    placed = [(scale.x(us), scale.y(nbytes)) for nbytes, us in sorted(points, key=lambda point: point[1])]
    chosen = Mark("this plan", scale.x(report.time_us), scale.y(plan.peak_bytes))
    return Frontier(curve(placed), tuple(Mark("", left, bottom) for left, bottom in placed), chosen, tuple(points), scale)


def _steps(spans: Sequence[tuple[int, int]]) -> str:
    """Steps from one to another, as far as a cell of a table goes."""
    texts = [f"{start} to {end}".replace(" ", "\N{NO-BREAK SPACE}") for start, end in spans[:_MOST_SPANS]]
    return ", ".join([*texts, *(["..."] if len(spans) > _MOST_SPANS else [])])


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


_IN_WORDS: dict[str, Callable[..., str]] = {  # what the page's template says things by
    "bytes_text": bytes_text,
    "time_text": time_text,
    "less_text": less_text,
    "kind_text": kind_text,
    "names": lambda operators: _short(" ".join(map(op_text, operators))),
    "short": _short,
    "steps": _steps,
}
_MOST = 40  # runs of steps that a strip can show
_DEEPEST = 4
_NARROWEST = 0.5  # percents of the strip


def module_marks(nodes: Sequence[Node], at: Sequence[float], scale: Scale) -> tuple[Mark, ...]:
    """The runs of steps of one module, named at the greatest depth at which the strip is not too crowded."""
    marks: tuple[Mark, ...] = ()
    for depth in range(1, _DEEPEST + 1):
        spans = ((name, scale.x(at[first]), scale.x(at[last])) for name, first, last in _runs(nodes, depth))
        wide = tuple(Mark(name, left=left, span=right - left) for name, left, right in spans if name and right - left > _NARROWEST)
        if marks and len(wide) > _MOST:
            break
        marks = wide
    return marks


def _runs(nodes: Sequence[Node], depth: int) -> list[tuple[str, int, int]]:
    """(module, first step, step after the last), those without a module left out of a run that goes on."""
    names = [(step, ".".join(node.source.module.split(".")[:depth])) for step, node in enumerate(nodes) if node.source is not None]
    runs = []
    for name, of in groupby(names, key=lambda pair: pair[1]):
        steps = [step for step, _ in of]
        runs.append((name, steps[0], steps[-1] + 1))
    return runs


def save_page(plan: Contents, path: str | os.PathLike[str]) -> None:
    """Write the page to a file, which is at every moment whole or what it was before. Raises OSError."""
    write_whole(path, page(plan))


def page(plan: Contents, title: str = "") -> str:
    course = Course.of(plan)
    charts, scale = _charts(plan, course)
    at = begins(course.timeline, scale.by_time)
    text: str = template(_PAGES / "plan.html").render(
        title=title or "A step's memory",
        plan=plan,
        line=one_line(plan),
        charts=charts,
        scale=scale,
        modules=module_marks(course.nodes, at, scale),
        addresses=addresses(course, scale),
        peak_line=None if plan.peak is None else snapshot_line(plan.peak, again=plan.cost_report is not None),
        frontier=frontier(plan),
        splits=splits_of(plan)[:_MOST_ROWS],
        tensors=course.tensors,
        most=_MOST_ROWS,
        summary=summarize(plan),
        provenance=asdict(plan.provenance) | {"solver": plan.solver, "program": plan.program},
        data=_data(course, at),
        **_IN_WORDS,
    )
    return text


def _charts(plan: Contents, course: Course) -> tuple[list[Chart], Scale]:
    """Memory over the planned step, and over the program as it stood, on one scale."""
    timelines, scale = course.beside(plan.eager)
    titles = ("lowtide", "eager PyTorch")
    return [stack(title, timeline, scale) for title, timeline in zip(titles, timelines, strict=False)], scale


def _data(course: Course, at: list[float]) -> dict[str, Any]:
    """What the page's script reads. Where steps begin is told in whole numbers as differences, which take the fewest digits."""
    most = at[-1] or 1.0
    positions = [round(10_000 * each / most) for each in at]
    return {
        "at": [positions[0], *(after - before for before, after in pairwise(positions))],
        "steps": step_rows(course),
        "tensors": tensor_rows(course.tensors),
    }


def needs_page(title: str, headline: str, kinds: str, rows: Sequence[Sequence[str]], assumed: str) -> str:
    """What a model needs, as a page; all texts are escaped."""
    return str(template(_PAGES / "needs.html").render(title=title, headline=headline, kinds=kinds, rows=rows, assumed=assumed))
