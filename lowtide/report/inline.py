"""A small picture of a plan, for a notebook: one SVG with colours of its own, which needs no script, no style sheet and no matplotlib."""

from __future__ import annotations

import html

from lowtide.base.messages import bytes_text
from lowtide.plan.contents import Contents
from lowtide.report.chart import COLOURS, Chart, Course, Scale, begins, curve, has_times, stack

_WIDTH, _HEIGHT = 800, 300  # pixels
_LEFT, _TOP, _RIGHT, _BOTTOM = 80, 28, 180, 24  # of margins, with text in them
_LINE = 16  # pixels from one line of the legend to the next
_OTHERS = "#57606a"


def svg(plan: Contents) -> str:
    """Memory over the planned step by kind, and the course of eager PyTorch as a line."""
    course = Course.of(plan)
    timelines = [course.timeline, *([plan.eager] if plan.eager is not None else [])]
    by_time = has_times(timelines)
    most_x = max(begins(timeline, by_time)[-1] for timeline in timelines)
    scale = Scale(most_x, round(1.08 * max(max(timeline.footprint_bytes, default=0) for timeline in timelines)), by_time)
    chart = stack("lowtide", course.timeline, scale)
    title = f"Memory over the step: peak {bytes_text(plan.peak_bytes)}, in eager PyTorch {bytes_text(plan.eager_peak_bytes)}"
    return "".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" '
            f'style="max-width:100%;font:12px system-ui,sans-serif" fill="currentColor"><title>{html.escape(title)}</title>',
            _text(_LEFT, 16, title),
            _areas(chart, _eager_line(plan, scale)),
            _sides(scale),
            _legend(chart, plan.eager is not None),
            "</svg>",
        )
    )


def _eager_line(plan: Contents, scale: Scale) -> str:
    if plan.eager is None:
        return ""
    total = plan.eager.footprint_bytes
    if not total:
        return ""
    points = zip(begins(plan.eager, scale.by_time), [*total, total[-1]], strict=True)
    path = curve([(scale.x(at), scale.y(nbytes)) for at, nbytes in points])
    return f'<path d="{path}" fill="none" stroke="currentColor" vector-effect="non-scaling-stroke"/>'


def _areas(chart: Chart, line: str) -> str:
    paths = (f'<path d="{band.path}" fill="{COLOURS.get(band.style, _OTHERS)}"/>' for band in chart.bands)
    size = f'width="{_WIDTH - _LEFT - _RIGHT}" height="{_HEIGHT - _TOP - _BOTTOM}"'
    return f'<svg x="{_LEFT}" y="{_TOP}" {size} viewBox="0 0 1000 1000" preserveAspectRatio="none">{"".join(paths)}{line}</svg>'


def _sides(scale: Scale) -> str:
    ground, width = _HEIGHT - _BOTTOM, _WIDTH - _LEFT - _RIGHT
    down = (_text(_LEFT - 6, ground - each.bottom / 100 * (ground - _TOP) + 4, each.text, "end") for each in scale.y_ticks)
    along = (_text(_LEFT + each.left / 100 * width, _HEIGHT - 8, each.text, "middle") for each in scale.x_ticks)
    return "".join((*down, *along))


def _legend(chart: Chart, eager: bool) -> str:
    left, lines = _WIDTH - _RIGHT + 12, []
    for number, band in enumerate(reversed(chart.bands)):
        top = _TOP + _LINE * number
        lines.append(f'<rect x="{left}" y="{top}" width="10" height="10" fill="{COLOURS.get(band.style, _OTHERS)}"/>')
        lines.append(_text(left + 16, top + 10, band.name))
    if eager:
        top = _TOP + _LINE * len(chart.bands) + 5
        lines.append(f'<path d="M{left} {top}h10" stroke="currentColor"/>{_text(left + 16, top + 5, "eager PyTorch")}')
    return "".join(lines)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{html.escape(text)}</text>'
