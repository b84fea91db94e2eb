"""A plan for other tools: a trace for Chrome and Perfetto, and a snapshot that PyTorch's memory_viz page opens.

A trace has the operators' stream, beside it what goes on meanwhile, and memory. A copy to the host goes on from its store to its drop, one
to the device from its load to its first reader, a collective from its begin to its wait: these are the spans within which the other streams
have to be done, not what they take.

A snapshot has the form of `torch.cuda.memory._dump_snapshot`. The caller's own tensors are blocks that were there before. What the step
makes is allocated and freed where greedy placement puts it.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from lowtide.base.files import write_whole
from lowtide.base.messages import bytes_text, op_text
from lowtide.ir.graph import Node, Source
from lowtide.ir.operators.nodes import begins_collective
from lowtide.ir.operators.row import LOAD, STORE
from lowtide.placement.picture import check_picture, save_figure
from lowtide.plan.contents import Contents
from lowtide.plan.snapshot import LiveTensor
from lowtide.report.chart import COLOURS, Course, begins, has_times, name_of, placed, rows_of


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
    for number, (stream, start, end) in enumerate(_spans_beside(course.nodes)):
        known = {"name": op_text(course.nodes[start].op), "cat": stream, "pid": 1, "id": number}
        events += [known | {"ph": "b", "ts": at[start], "args": _where(course.nodes[start].source)}, known | {"ph": "e", "ts": at[end]}]
    rows = [("workspace" if kind is None else kind.value, of) for kind, of in rows_of(course.timeline)]
    for step in range(len(course.nodes)):
        events.append({"name": "memory", "ph": "C", "pid": 1, "ts": at[step], "args": {name: of[step] for name, of in rows}})
    write_whole(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


def _spans_beside(nodes: Sequence[Node]) -> Iterator[tuple[str, int, int]]:
    """What goes on beside the operators: on which stream, the step that begins it, and the one that has to wait for it."""
    for start, node in enumerate(nodes):
        stream = _STREAMS.get(node.op, "other ranks" if begins_collective(node) else "")
        if not stream:
            continue
        results = {value.storage for value in node.results}
        readers = (step for step in range(start + 1, len(nodes)) if results & {value.storage for value in nodes[step].inputs})
        yield stream, start, next(readers, len(nodes))


_STREAMS = {STORE: "to the host", LOAD: "to the device"}


def _where(source: Source | None) -> dict[str, Any]:
    return {} if source is None else {"module": source.module, "line": f"{source.file}:{source.line}"}


_PROTOCOL = 4  # of pickle: the page reads no later one
_BASE = 2**32  # addresses begin here: 0 is none


def save_memory_viz(plan: Contents, path: str | os.PathLike[str]) -> None:
    """Write what is allocated when, for https://pytorch.org/memory_viz. Raises OSError."""
    write_whole(path, pickle.dumps(memory_viz(plan), protocol=_PROTOCOL))


def memory_viz(plan: Contents) -> dict[str, Any]:
    """The snapshot, of plain numbers, texts, lists and dictionaries."""
    course = Course.of(plan)
    blocks_placed, steps = placed(course), len(course.nodes)
    addressed = [(tensor, _BASE + offset) for tensor, offset in zip(blocks_placed.tensors, blocks_placed.offsets, strict=True)]
    owned = list(_beside([tensor for tensor in course.tensors if not tensor.op], _BASE + blocks_placed.arena_bytes))
    left = sorted([*((address, tensor) for tensor, address in addressed if tensor.end >= steps), *owned], key=lambda pair: pair[0])
    end = _BASE + blocks_placed.arena_bytes + sum(tensor.nbytes for _, tensor in owned)
    blocks = list(_blocks(left, end))
    active = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    segment = {
        "device": 0,
        "address": _BASE,
        "total_size": end - _BASE,
        "allocated_size": active,
        "active_size": active,
        "requested_size": active,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
    at = begins(course.timeline, has_times([course.timeline]))
    events = sorted(_events(addressed, at, steps), key=lambda event: event[:2])
    return {
        "segments": [segment],
        "device_traces": [[event for _, _, event in events]],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _beside(tensors: Sequence[LiveTensor], address: int) -> Iterator[tuple[int, LiveTensor]]:
    for tensor in tensors:
        yield address, tensor
        address += tensor.nbytes


def _events(addressed: Sequence[tuple[LiveTensor, int]], at: Sequence[float], steps: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(step, rank within it, event): what ends with a step is free before the next one takes its memory."""
    for tensor, address in addressed:
        yield tensor.start, 1, _event("alloc", tensor, address, at[tensor.start])
        if tensor.end < steps:
            for action in ("free_requested", "free_completed"):
                yield tensor.end, 0, _event(action, tensor, address, at[tensor.end])


def _event(action: str, tensor: LiveTensor, address: int, at_us: float) -> dict[str, Any]:
    event = {"action": action, "addr": address, "size": tensor.nbytes, "stream": 0, "time_us": int(at_us)}
    return event | {"frames": _frames(tensor)}


def _frames(tensor: LiveTensor) -> list[dict[str, Any]]:
    """Who made it, as the page shows stacks: the operator, the module, the tensor's name."""
    source = tensor.source
    file, line = ("", 0) if source is None else (source.file, source.line)
    names = filter(None, (op_text(tensor.op), tensor.module, f"{tensor.name} ({tensor.kind.value})"))
    return [{"name": name, "filename": file, "line": line} for name in names]


def _blocks(left: Sequence[tuple[int, LiveTensor]], end: int) -> Iterator[dict[str, Any]]:
    """What the segment holds when the step is over, with the gaps between."""
    address = _BASE
    for start, tensor in left:
        if start > address:
            yield _block(address, start - address)
        yield _block(start, tensor.nbytes, tensor)
        address = start + tensor.nbytes
    if end > address:
        yield _block(address, end - address)


def _block(address: int, size: int, tensor: LiveTensor | None = None) -> dict[str, Any]:
    entries = ("inactive", 0, []) if tensor is None else ("active_allocated", size, _frames(tensor))
    return {"address": address, "size": size} | dict(zip(("state", "requested_size", "frames"), entries, strict=True))


_INCHES = (9, 4)
_MIB = 2**20


def save_picture(plan: Contents, path: str | os.PathLike[str]) -> None:
    """Draw a plan, in the format that the path ends in: .png, .svg or .pdf.

    Raises ImportError where matplotlib is not installed, FormatError for another suffix, OSError where the file cannot be written.
    """
    check_picture(path)
    from matplotlib.figure import Figure

    course = Course.of(plan)
    by_time = course.beside(plan.eager)[1].by_time
    unit = 1e3 if by_time else 1
    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.add_subplot()
    rows, at = rows_of(course.timeline), [each / unit for each in begins(course.timeline, by_time)]
    stacked = [[nbytes / _MIB for nbytes in (*of, of[-1])] for _, of in rows]
    kinds = ["workspace" if kind is None else kind.value for kind, _ in rows]
    names = [name_of(kind) for kind, _ in rows]
    if at[1:]:
        axes.stackplot(at, stacked, labels=names, colors=[COLOURS.get(kind, "#57606a") for kind in kinds], step="post")
    if plan.eager is not None and plan.eager.workspace_bytes:
        total = [nbytes / _MIB for nbytes in plan.eager.footprint_bytes]
        axes.step(
            [each / unit for each in begins(plan.eager, by_time)], [*total, total[-1]], where="post", color="#1f2328", label="eager PyTorch"
        )
    axes.set(xlabel="milliseconds" if by_time else "step", ylabel="MiB", xlim=(0, None), ylim=(0, None))
    axes.set_title(f"peak {bytes_text(plan.peak_bytes)} of {bytes_text(plan.eager_peak_bytes)} in eager PyTorch")
    axes.legend(frameon=False, fontsize="small")
    save_figure(figure, path)
