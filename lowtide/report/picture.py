"""Memory over a step as a picture: what is planned, stacked by kind, and eager PyTorch's total as a line."""

from __future__ import annotations

import io
import os
from pathlib import Path

from lowtide.base.files import write_whole
from lowtide.base.messages import bytes_text
from lowtide.placement.picture import check_picture
from lowtide.plan.contents import Contents
from lowtide.plan.snapshot import kind_text
from lowtide.report.chart import Course, begins, has_times, rows_of

_INCHES = (9, 4)
_DPI = 150
_MIB = 2**20
_COLOURS = {
    "parameter": "#6e7781", "buffer": "#8c959f", "state": "#afb8c1", "input": "#9a6700", "constant": "#bf8700", "activation": "#0969da",
    "gradient": "#bc4c00", "temporary": "#8250df", "workspace": "#1a7f37",
}  # fmt: skip


def save_picture(plan: Contents, path: str | os.PathLike[str]) -> None:
    """Draw a plan, in the format that the path ends in: .png, .svg or .pdf.

    Raises ImportError where matplotlib is not installed, FormatError for another suffix, OSError where the file cannot be written.
    """
    check_picture(path)
    from matplotlib.figure import Figure

    course = Course.of(plan)
    timelines = [course.timeline, *([plan.eager] if plan.eager is not None else [])]
    by_time = has_times(timelines)
    unit = 1e3 if by_time else 1
    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.add_subplot()
    rows, at = rows_of(course.timeline), [each / unit for each in begins(course.timeline, by_time)]
    stacked = [[nbytes / _MIB for nbytes in (*of, of[-1])] for _, of in rows]
    kinds = ["workspace" if kind is None else kind.value for kind, _ in rows]
    names = ["workspace of operators" if kind is None else kind_text(kind) for kind, _ in rows]
    if at[1:]:
        axes.stackplot(at, stacked, labels=names, colors=[_COLOURS.get(kind, "#57606a") for kind in kinds], step="post")
    if plan.eager is not None and plan.eager.workspace_bytes:
        total = [nbytes / _MIB for nbytes in plan.eager.footprint_bytes]
        axes.step(
            [each / unit for each in begins(plan.eager, by_time)], [*total, total[-1]], where="post", color="#1f2328", label="eager PyTorch"
        )
    axes.set(xlabel="milliseconds" if by_time else "step", ylabel="MiB", xlim=(0, None), ylim=(0, None))
    axes.set_title(f"peak {bytes_text(plan.peak_bytes)} of {bytes_text(plan.eager_peak_bytes)} in eager PyTorch")
    axes.legend(frameon=False, fontsize="small")
    drawn = io.BytesIO()
    figure.savefig(drawn, format=Path(path).suffix.lower().removeprefix("."), dpi=_DPI)
    write_whole(path, drawn.getvalue())
