"""The page: one file that holds all it shows, asks no network, and escapes every name that it was given.

Which part of the model a step is of: runs of steps of one module, at a depth at which there are few.

It tells of single tensors, of what was evicted, and of what memory buys.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from lowtide.base.files import template, write_whole
from lowtide.base.messages import bytes_text, less_text, op_text, time_text
from lowtide.ir.graph import Node
from lowtide.plan.contents import Contents
from lowtide.plan.cost_report import Eviction
from lowtide.plan.snapshot import LiveTensor, kind_text, source_text
from lowtide.plan.summary import one_line, snapshot_line, splits_of, summarize
from lowtide.report.chart import Chart, Course, Mark, Scale, addresses, begins, curve, stack

_PAGES = Path(__file__).parent / "pages"
_MOST_ROWS = 200
_LONGEST = 120  # of a name that a page shows


@dataclass(frozen=True)
class Frontier:
    """What memory buys: time against bytes, of all that was found best at something."""

    path: str
    points: tuple[Mark, ...]
    chosen: Mark
    rows: tuple[tuple[str, ...], ...]  # peak, time, what that adds to the time without recomputation
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


def largest(course: Course) -> list[tuple[str, ...]]:
    """The tensors of most bytes, as a table shows them."""
    return [
        (
            bytes_text(each.nbytes),
            _short(each.name),
            each.dtype_and_shape,
            kind_text(each.kind),
            _steps(each.start, each.end),
            _short(each.made_by),
        )
        for each in course.tensors[:_MOST_ROWS]
    ]


def evictions(plan: Contents) -> list[tuple[str, ...]]:
    """What is evicted and restored, as a table shows it."""
    costs = () if plan.cost_report is None else plan.cost_report.evictions
    return [_eviction(each) for each in costs[:_MOST_ROWS]]


def _eviction(each: Eviction) -> tuple[str, ...]:
    away = ", ".join(_steps(start, end) for start, end in each.away[:4]) + (", ..." if len(each.away) > 4 else "")
    runs = f"{each.runs} run again, {time_text(each.run_us)}" if each.runs else ""
    moved = f"{time_text(each.store_us)} to the host, {time_text(each.load_us)} back" if each.load_us else ""
    cost = "; ".join(filter(None, (runs, moved)))
    return (
        bytes_text(each.tensor.nbytes),
        each.tensor.dtype_and_shape,
        _short(each.tensor.made_by),
        each.how,
        away,
        "yes" if each.at_peak else "no",
        cost,
    )


def splits(plan: Contents) -> list[tuple[str, ...]]:
    return [
        (
            bytes_text(each.part_bytes),
            bytes_text(each.whole_bytes),
            _short(" ".join(map(op_text, each.operators))),
            each.where,
            f"{each.dimension} ({each.extent})",
            f"{each.parts} of {each.part}",
            time_text(each.us) if each.us else "",
        )
        for each in splits_of(plan)[:_MOST_ROWS]
    ]


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
    rows = tuple((bytes_text(nbytes), time_text(us), report.added(us)) for nbytes, us in points)
    return Frontier(curve(placed), tuple(Mark("", left, bottom) for left, bottom in placed), chosen, rows, scale)


def host_rows(plan: Contents) -> list[tuple[str, ...]]:
    """What memory of the host buys within the device's: what is pinned, the time, what that adds to the time without a limit."""
    report = plan.cost_report
    if report is None:
        return []
    return [(bytes_text(each.pinned_bytes), time_text(each.time_us), report.added(each.time_us)) for each in report.host_frontier]


def _steps(start: int, end: int) -> str:
    return f"{start} to {end}".replace(" ", "\N{NO-BREAK SPACE}")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


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
        line=one_line(plan),
        figures=_figures(plan),
        charts=charts,
        scale=scale,
        modules=module_marks(course.nodes, at, scale),
        addresses=addresses(course, scale),
        peak_line=None if plan.peak is None else snapshot_line(plan.peak, again=plan.cost_report is not None),
        frontier=frontier(plan),
        host_rows=host_rows(plan),
        splits=splits(plan),
        evictions=evictions(plan),
        left_out_evictions=max(0, len(plan.cost_report.evictions) - len(evictions(plan))) if plan.cost_report else 0,
        tensors=largest(course),
        left_out=max(0, len(course.tensors) - len(largest(course))),
        summary=summarize(plan),
        provenance=asdict(plan.provenance) | {"solver": plan.solver, "program": plan.program},
        data=_data(course, at),
    )
    return text


def _charts(plan: Contents, course: Course) -> tuple[list[Chart], Scale]:
    """Memory over the planned step, and over the program as it stood, on one scale."""
    timelines, scale = course.beside(plan.eager)
    titles = ("lowtide", "eager PyTorch")
    return [stack(title, timeline, scale) for title, timeline in zip(titles, timelines, strict=False)], scale


def _figures(plan: Contents) -> list[tuple[str, str, str]]:
    """(what, how much, a remark) of what a reader looks for first."""
    less = f"{less_text(plan.peak_bytes, plan.eager_peak_bytes)} than eager" if plan.eager_peak_bytes else ""
    gap_bytes = plan.peak_bytes - plan.lower_bound_bytes
    proof = "proven: no order of these operators needs less" if not gap_bytes else f"at most {bytes_text(gap_bytes)} above the least"
    figures = [
        ("promised peak", bytes_text(plan.peak_bytes), less),
        ("eager PyTorch", bytes_text(plan.eager_peak_bytes), "the program as it stands"),
        ("resident throughout", bytes_text(plan.resident_bytes), "parameters, state, batch: what you hold"),
        ("proof", bytes_text(plan.lower_bound_bytes), proof),
    ]
    if plan.pinned_bytes:
        limit = "" if plan.host_bytes is None else f"of {bytes_text(plan.host_bytes)} that may be"
        figures.append(("pinned on the host", bytes_text(plan.pinned_bytes), limit))
    report = plan.cost_report
    if report is not None:
        added = f"{report.added(report.time_us)} against no limit" if report.order_us else ""
        figures.append(("promised time", time_text(report.time_us), added))
        if report.time_bound_us:
            figures.append(("proven time", time_text(report.time_bound_us), "no run of the graphs tried takes less within this peak"))
    if plan.measured_peak_bytes is not None:
        figures.append(("measured peak", bytes_text(plan.measured_peak_bytes), "by the allocator"))
    return figures


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
