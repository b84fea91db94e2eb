"""Charts as paths in a square of 1000 by 1000 that a page stretches, and one as an SVG with colours of its own; all text is beside them.

The course of a step is what they show: what lives when, from a plan alone, and which time each of its steps begins at. The SVG is for a
notebook: it needs no script, no style sheet and no matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from lowtide.base.files import template
from lowtide.base.messages import bytes_text, time_text
from lowtide.ir.graph import Kind, Node
from lowtide.placement import Portfolio, place
from lowtide.plan.contents import Contents, Timeline
from lowtide.plan.snapshot import LiveTensor, kind_text
from lowtide.plan.summary import live_tensors
from lowtide.problems.placement import PlaceProblem

# Of pictures that have no style sheet, by kind.
COLOURS = {
    "parameter": "#6e7781", "buffer": "#8c959f", "state": "#afb8c1", "input": "#9a6700", "constant": "#bf8700", "activation": "#0969da",
    "gradient": "#bc4c00", "temporary": "#8250df", "workspace": "#1a7f37",
}  # fmt: skip
_SVG = Path(__file__).parent / "pages" / "memory.svg"


@dataclass(frozen=True)
class Course:
    """A planned step: its nodes as they run, its tensors, and memory over them."""

    nodes: tuple[Node, ...]  # by step
    tensors: tuple[LiveTensor, ...]  # all that have bytes, the largest first
    timeline: Timeline

    @classmethod
    def of(cls, plan: Contents) -> Course:
        nodes = tuple(plan.graph.nodes[index] for index in plan.order)
        tensors = tuple(live_tensors(plan))
        workspace_bytes = [plan.workspace_bytes[index] for index in plan.order]
        us = [plan.node_us[index] for index in plan.order] if plan.node_us else ()
        spans = ((each.kind, each.nbytes, each.start, each.end) for each in tensors)
        return cls(nodes, tensors, Timeline.of(spans, workspace_bytes, nodes, us))

    def beside(self, eager: Timeline | None) -> tuple[list[Timeline], Scale]:
        """Memory over it, and over eager PyTorch's where that is known, and a scale for both."""
        timelines = [self.timeline, *([] if eager is None else [eager])]
        by_time = has_times(timelines)
        most_x = max(begins(timeline, by_time)[-1] for timeline in timelines)
        most_bytes = max(max(timeline.footprint_bytes, default=0) for timeline in timelines)
        return timelines, Scale(most_x, round(most_bytes * 1.08), by_time)


def begins(timeline: Timeline, by_time: bool) -> list[float]:
    """Where each step begins, and after the last one where it ends: microseconds, or steps."""
    steps = len(timeline.workspace_bytes)
    return list(accumulate(timeline.us, initial=0.0)) if by_time else [float(step) for step in range(steps + 1)]


def has_times(timelines: Sequence[Timeline]) -> bool:
    return all(timeline.us and sum(timeline.us) > 0 for timeline in timelines)


def rows_of(timeline: Timeline) -> list[tuple[Kind | None, tuple[int, ...]]]:
    """Bytes by step of each kind, from the bottom of a picture to its top: what stays the same throughout first; None: workspaces."""
    rows: list[tuple[Kind | None, tuple[int, ...]]] = [(kind, of) for kind, of in timeline.nbytes.items() if any(of)]
    rows.sort(key=lambda row: len(set(row[1])) > 1)
    return [*rows, (None, timeline.workspace_bytes)] if any(timeline.workspace_bytes) else rows


_SIDE = 1000
_COLUMNS = 1000  # of an area: steps that fall into one are drawn as the highest of them
_TICKS = 5


@dataclass(frozen=True)
class Band:
    name: str  # "activations"
    style: str  # class of the page's style sheet
    path: str
    most: str  # its most bytes, for people


@dataclass(frozen=True)
class Mark:
    """A text at a place, in percents from the left and from the bottom; `span` is how far it reaches to the right."""

    text: str
    left: float = 0.0
    bottom: float = 0.0
    span: float = 0.0
    style: str = ""


@dataclass(frozen=True)
class Scale:
    most_x: float  # microseconds or steps
    most_bytes: int
    by_time: bool

    def x(self, at: float) -> float:
        """In percents."""
        return 100 * at / self.most_x if self.most_x else 0.0

    def y(self, nbytes: float) -> float:
        """In percents."""
        return 100 * nbytes / self.most_bytes if self.most_bytes else 0.0

    def x_text(self, at: float) -> str:
        return (time_text(at) if at else "0") if self.by_time else f"step {at:.0f}"

    @property
    def x_ticks(self) -> list[Mark]:
        return [Mark(self.x_text(at), left=self.x(at)) for at in _round_ticks(self.most_x)]

    @property
    def y_ticks(self) -> list[Mark]:
        return [Mark(bytes_text(int(at)), bottom=self.y(at)) for at in _round_ticks(self.most_bytes, binary=True)]


@dataclass(frozen=True)
class Chart:
    """Memory over a step."""

    title: str
    bands: tuple[Band, ...]
    phases: tuple[Mark, ...]
    peak: Mark
    width: float  # percents of the scale that the step takes


def stack(title: str, timeline: Timeline, scale: Scale) -> Chart:
    at = begins(timeline, scale.by_time)
    total = timeline.footprint_bytes
    columns = _columns(at, total, scale)
    floor = [0] * len(total)
    bands = []
    for kind, nbytes in rows_of(timeline):
        ceiling = [low + own for low, own in zip(floor, nbytes, strict=True)]
        style = "workspace" if kind is None else kind.value
        bands.append(Band(name_of(kind), style, _area(at, columns, floor, ceiling, scale), bytes_text(max(nbytes))))
        floor = ceiling
    peak = max(total, default=0)
    step = total.index(peak) if total else 0
    mark = Mark(f"peak {bytes_text(peak)}", scale.x(at[step]), scale.y(peak))
    return Chart(title, tuple(bands), _phases(timeline, at, scale), mark, scale.x(at[-1]))


def curve(points: Sequence[tuple[float, float]]) -> str:
    """A line through points in percents that goes right first and then up or down."""
    pieces = [f"M{points[0][0] * 10:.1f} {_SIDE - points[0][1] * 10:.1f}"] if points else []
    return "".join([*pieces, *(f"H{left * 10:.1f}V{_SIDE - bottom * 10:.1f}" for left, bottom in points[1:])])


def name_of(kind: Kind | None) -> str:
    return "workspace of operators" if kind is None else kind_text(kind)


def _columns(at: Sequence[float], total: Sequence[int], scale: Scale) -> list[int]:
    """The steps that are drawn: of those that begin in one column the highest."""
    best: dict[int, int] = {}
    for step, nbytes in enumerate(total):
        column = int(scale.x(at[step]) * _COLUMNS / 100)
        if column not in best or nbytes > total[best[column]]:
            best[column] = step
    return list(best.values())


def _area(at: Sequence[float], columns: Sequence[int], floor: Sequence[int], ceiling: Sequence[int], scale: Scale) -> str:
    """The outline between two lines: along the upper one to the right, back along the lower one."""
    if not columns:
        return ""
    left = [0.0, *(scale.x(at[step]) * 10 for step in columns[1:]), scale.x(at[-1]) * 10]
    upper = [_SIDE - scale.y(ceiling[step]) * 10 for step in columns]
    lower = [_SIDE - scale.y(floor[step]) * 10 for step in columns]
    there = "".join(f"V{y:.1f}H{x:.1f}" for y, x in zip(upper, left[1:], strict=True))
    back = "".join(f"V{y:.1f}H{x:.1f}" for y, x in zip(reversed(lower), reversed(left[:-1]), strict=True))
    return f"M0 {lower[0]:.1f}{there}{back}Z"


def _phases(timeline: Timeline, at: Sequence[float], scale: Scale) -> tuple[Mark, ...]:
    """A strip of the phases; those that begin and end within a column are left out."""
    borders = [*timeline.phases, ("", len(at) - 1)]
    marks = []
    for (name, first), (_, last) in pairwise(borders):
        left, right = scale.x(at[first]), scale.x(at[last])
        if right - left > 100 / _COLUMNS:
            marks.append(Mark(name, left=left, span=right - left, style=name))
    return tuple(marks)


def _round_ticks(most: float, binary: bool = False) -> list[float]:
    if most <= 0:
        return [0.0]
    base = 2.0 if binary else 10.0
    step = 1.0
    while step * base * _TICKS <= most:
        step *= base
    for factor in (1, 2) if binary else (1, 2, 5, 10):
        if most / (step * factor) <= _TICKS + 1:
            return [step * factor * tick for tick in range(int(most / (step * factor)) + 1)]
    return [0.0, most]


_ALIGN_BYTES = 64
_MOST = 4000  # rectangles, the largest ones


@dataclass(frozen=True)
class AddressChart:
    """Rectangles by kind, in a square of 1000 by 1000."""

    bands: tuple[Band, ...]
    arena: str  # its size, for people
    above: str  # how much that is above the most that lives at once
    left_out: int  # tensors too small to be shown
    scale: Scale


@dataclass(frozen=True)
class Placed:
    """The tensors that a step makes, each at an offset in one block."""

    tensors: tuple[LiveTensor, ...]
    offsets: tuple[int, ...]  # bytes
    arena_bytes: int
    bound_bytes: int  # no arena can be smaller


def placed(course: Course) -> Placed:
    """What the step makes, by greedy placement. What the caller holds lies elsewhere."""
    tensors = tuple(each for each in course.tensors if each.op and each.start < each.end)
    sizes, starts, ends = [each.nbytes for each in tensors], [each.start for each in tensors], [each.end for each in tensors]
    placement = place(PlaceProblem.of(sizes, starts, ends, align_bytes=_ALIGN_BYTES), Portfolio())
    return Placed(tensors, tuple(map(int, placement.offsets)), int(placement.arena_bytes), int(placement.lower_bound_bytes))


def addresses(course: Course, scale: Scale) -> AddressChart | None:
    """The tensors that the step makes, drawn; None where it makes none."""
    blocks = placed(course)
    if not blocks.tensors:
        return None
    own = Scale(scale.most_x, blocks.arena_bytes, scale.by_time)
    at, shown = begins(course.timeline, scale.by_time), list(zip(blocks.tensors, blocks.offsets, strict=True))[:_MOST]
    kinds = dict.fromkeys(each.kind for each, _ in shown)
    bands = tuple(_band(kind, [pair for pair in shown if pair[0].kind is kind], at, own) for kind in kinds)
    excess = blocks.arena_bytes / blocks.bound_bytes - 1 if blocks.bound_bytes else 0.0
    return AddressChart(bands, bytes_text(blocks.arena_bytes), f"{excess:.1%}", len(blocks.tensors) - len(shown), own)


def _band(kind: Kind, placed: Sequence[tuple[LiveTensor, int]], at: Sequence[float], scale: Scale) -> Band:
    path = "".join(_rectangle(each, offset, at, scale) for each, offset in placed)
    return Band(kind_text(kind), kind.value, path, bytes_text(max(each.nbytes for each, _ in placed)))


def _rectangle(tensor: LiveTensor, offset: int, at: Sequence[float], scale: Scale) -> str:
    left, right = 10 * scale.x(at[tensor.start]), 10 * scale.x(at[tensor.end])
    top, bottom = 1000 - 10 * scale.y(offset + tensor.nbytes), 1000 - 10 * scale.y(offset)
    return f"M{left:.1f} {bottom:.1f}H{right:.1f}V{top:.1f}H{left:.1f}Z"


def svg(plan: Contents) -> str:
    """Memory over the planned step by kind, and the course of eager PyTorch as a line."""
    course = Course.of(plan)
    scale = course.beside(plan.eager)[1]
    title = f"Memory over the step: peak {bytes_text(plan.peak_bytes)}, in eager PyTorch {bytes_text(plan.eager_peak_bytes)}"
    chart, eager = stack("lowtide", course.timeline, scale), None if plan.eager is None else _outline(plan.eager, scale)
    return str(template(_SVG).render(title=title, chart=chart, scale=scale, colours=COLOURS, eager=eager))


def _outline(timeline: Timeline, scale: Scale) -> str:
    total = timeline.footprint_bytes
    points = zip(begins(timeline, scale.by_time), [*total, *total[-1:]], strict=False)
    return curve([(scale.x(at), scale.y(nbytes)) for at, nbytes in points])
