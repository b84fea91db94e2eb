"""What a page tells of single tensors, of what was evicted, and of what memory buys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.base.messages import bytes_text, op_text, time_text
from lowtide.plan.contents import Contents
from lowtide.plan.cost_report import Eviction
from lowtide.plan.snapshot import LiveTensor, kind_text, source_text
from lowtide.plan.summary import splits_of
from lowtide.report.chart import Mark, Scale, curve
from lowtide.report.course import Course

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
        [_short(each.name), each.nbytes, each.kind.value, dtype_and_shape(each), origin(each), each.start, each.end] for each in tensors
    ]


def step_rows(course: Course) -> list[list[object]]:
    """For the page's script: what runs at each step, and what memory it finds."""
    pairs = zip(course.nodes, course.timeline.footprint_bytes, strict=True)
    return [[op_text(node.op), _short(source_text(node.source)), nbytes] for node, nbytes in pairs]


def dtype_and_shape(tensor: LiveTensor) -> str:
    """As text: "float32[64, 10]"."""
    return f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"


def origin(tensor: LiveTensor) -> str:
    where = source_text(tensor.source)
    return _short(f"{op_text(tensor.op)}{f' of {where}' if where else ''}" if tensor.op else "the caller")


def largest(course: Course) -> list[tuple[str, ...]]:
    """The tensors of most bytes, as a table shows them."""
    return [
        (
            bytes_text(each.nbytes),
            _short(each.name),
            dtype_and_shape(each),
            kind_text(each.kind),
            _steps(each.start, each.end),
            origin(each),
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
        dtype_and_shape(each.tensor),
        origin(each.tensor),
        each.how,
        away,
        "yes" if each.at_peak else "no",
        cost,
    )


def splits(plan: Contents) -> list[tuple[str, ...]]:
    return [
        (
            bytes_text(each.part_bytes), bytes_text(each.whole_bytes), _short(" ".join(map(op_text, each.operators))), each.where,
            f"{each.dimension} ({each.extent})", f"{each.parts} of {each.part}", time_text(each.us) if each.us else "",
        )
        for each in splits_of(plan)[:_MOST_ROWS]
    ]  # fmt: skip


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
    rows = tuple(
        (bytes_text(nbytes), time_text(us), f"{us / report.order_us - 1:+.1%}" if report.order_us else "") for nbytes, us in points
    )
    return Frontier(curve(placed), tuple(Mark("", left, bottom) for left, bottom in placed), chosen, rows, scale)


def _steps(start: int, end: int) -> str:
    return f"{start} to {end}".replace(" ", "\N{NO-BREAK SPACE}")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
