"""The course of a step: what lives when, from a plan alone, and which time each of its steps begins at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from lowtide.ir.graph import Kind, Node
from lowtide.plan.contents import Contents
from lowtide.plan.snapshot import LiveTensor
from lowtide.plan.table import live_tensors
from lowtide.plan.timeline import Timeline


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
