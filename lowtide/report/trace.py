"""A plan as a trace for Chrome and Perfetto."""

from __future__ import annotations

import json
import os
from typing import Any

from lowtide.base.files import write_whole
from lowtide.base.units import op_text
from lowtide.ir.graph import Source
from lowtide.plan.contents import Contents
from lowtide.report.course import Course, begins, has_times, rows_of


def save_trace(plan: Contents, path: str | os.PathLike[str]) -> None:
    """Write the operators and the memory over the step as trace events (JSON), for chrome://tracing and Perfetto. Raises OSError."""
    course = Course.of(plan)
    at = begins(course.timeline, has_times([course.timeline]))
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "planned step"}}]
    for step, node in enumerate(course.nodes):
        known = {"op": node.op, "step": step, **_where(node.source)}
        events.append(
            {"name": op_text(node.op), "ph": "X", "pid": 1, "tid": 1, "ts": at[step], "dur": at[step + 1] - at[step], "args": known}
        )
    rows = [("workspace" if kind is None else kind.value, of) for kind, of in rows_of(course.timeline)]
    for step in range(len(course.nodes)):
        events.append({"name": "memory", "ph": "C", "pid": 1, "ts": at[step], "args": {name: of[step] for name, of in rows}})
    write_whole(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


def _where(source: Source | None) -> dict[str, Any]:
    return {} if source is None else {"module": source.module, "line": f"{source.file}:{source.line}"}
