"""A plan as a trace for Chrome and Perfetto: the operators' stream, beside it what goes on meanwhile, and memory.

A copy to the host goes on from its store to its drop, one to the device from its load to its first reader, a collective from its begin to
its wait: these are the spans within which the other streams have to be done, not what they take.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from lowtide.base.files import write_whole
from lowtide.base.units import op_text
from lowtide.ir.graph import Node, Source
from lowtide.ir.operators.collectives.nodes import begins_collective
from lowtide.ir.operators.names import LOAD, STORE
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
    for number, (stream, start, end) in enumerate(_beside(course.nodes)):
        known = {"name": op_text(course.nodes[start].op), "cat": stream, "pid": 1, "id": number}
        events += [known | {"ph": "b", "ts": at[start], "args": _where(course.nodes[start].source)}, known | {"ph": "e", "ts": at[end]}]
    rows = [("workspace" if kind is None else kind.value, of) for kind, of in rows_of(course.timeline)]
    for step in range(len(course.nodes)):
        events.append({"name": "memory", "ph": "C", "pid": 1, "ts": at[step], "args": {name: of[step] for name, of in rows}})
    write_whole(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


def _beside(nodes: Sequence[Node]) -> Iterator[tuple[str, int, int]]:
    """What goes on beside the operators: on which stream, the step that begins it, and the one that has to wait for it."""
    for start, node in enumerate(nodes):
        stream = _STREAMS.get(node.op, "other ranks" if begins_collective(node) else "")
        if not stream:
            continue
        made = {value.storage for value in node.results}
        readers = (step for step in range(start + 1, len(nodes)) if made & {value.storage for value in nodes[step].inputs})
        yield stream, start, next(readers, len(nodes))


_STREAMS = {STORE: "to the host", LOAD: "to the device"}


def _where(source: Source | None) -> dict[str, Any]:
    return {} if source is None else {"module": source.module, "line": f"{source.file}:{source.line}"}
