"""What a plan holds: a graph, what was decided about it, what that promises, and how it came about; memory over the steps of a program."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from lowtide.base import fields
from lowtide.ir.graph import Graph, Kind, Node
from lowtide.ir.operators.nodes import is_arithmetic, is_view
from lowtide.plan.cost_report import CostReport, GeneratedRegion, RuleReport
from lowtide.plan.snapshot import Snapshot, phase_of

_PHASES = ("forward", "backward", "optimizer")
_FIELDS = {"nbytes", "workspace_bytes", "phases", "us"}


@dataclass(frozen=True)
class Timeline:
    """At each step the bytes of every kind and the workspace are the footprint."""

    nbytes: dict[Kind, tuple[int, ...]]  # by step, of the tensors that live then; of kinds that have any
    workspace_bytes: tuple[int, ...]  # by step
    phases: tuple[tuple[str, int], ...]  # ("backward", 120): from step 120 on; the name changes from one to the next
    us: tuple[float, ...] = ()  # by step, how long it takes; empty where times do not matter

    @classmethod
    def of(
        cls, spans: Iterable[tuple[Kind, int, int, int]], workspace_bytes: Sequence[int], nodes: Sequence[Node], us: Sequence[float] = ()
    ) -> Timeline:
        """From (kind, bytes, start, end) of each tensor; the workspaces, nodes and times by step."""
        steps = len(workspace_bytes)
        change: dict[Kind, list[int]] = defaultdict(lambda: [0] * (steps + 1))
        for kind, nbytes, start, end in spans:
            if nbytes and start < end:
                change[kind][start] += nbytes
                change[kind][end] -= nbytes
        kinds = sorted(change, key=list(Kind).index)
        return cls({kind: tuple(accumulate(change[kind][:-1])) for kind in kinds}, tuple(workspace_bytes), _phases(nodes), tuple(us))

    @property
    def footprint_bytes(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(self.workspace_bytes, *self.nbytes.values(), strict=True)))

    def rows(self) -> dict[str, Any]:
        rows: dict[str, Any] = {"nbytes": {kind.value: list(of) for kind, of in self.nbytes.items()}}
        rows |= {"workspace_bytes": list(self.workspace_bytes), "phases": [list(each) for each in self.phases]}
        return rows | ({"us": list(self.us)} if self.us else {})


def _phases(nodes: Sequence[Node]) -> tuple[tuple[str, int], ...]:
    """Where one phase goes over into another; what only looks at memory or computes with numbers is of the phase around it."""
    phases: list[tuple[str, int]] = []
    for step, node in enumerate(nodes):
        if phases and (is_view(node) or is_arithmetic(node)):
            continue
        if not phases or phase_of(node) != phases[-1][0]:
            phases.append((phase_of(node), step))
    return tuple(phases)


def timeline_from(where: str, item: Any) -> Timeline:
    """The timeline that `Timeline.rows` wrote. Raises FormatError for what cannot be one."""
    fields.check_fields(where, item, _FIELDS)
    by_kind, workspace_bytes = item.get("nbytes"), fields.integers(where, item, "workspace_bytes")
    if not isinstance(by_kind, dict) or not by_kind.keys() <= {kind.value for kind in Kind}:
        fields.refuse(where, "nbytes", "lists of bytes by kind", by_kind)
    nbytes = {Kind(kind): fields.integers(where, by_kind, kind) for kind in by_kind}
    for name, entries in [("nbytes", of) for of in nbytes.values()] + [("workspace_bytes", workspace_bytes)]:
        if len(entries) != len(workspace_bytes) or min(entries, default=0) < 0:
            fields.refuse(where, name, f"{len(workspace_bytes)} entries of 0 bytes or more", len(entries))
    us = times_from(where, item, "us", len(workspace_bytes)) if "us" in item else ()
    return Timeline(nbytes, workspace_bytes, _phases_from(where, item, len(workspace_bytes)), us)


def times_from(where: str, item: dict[str, Any], name: str, count: int) -> tuple[float, ...]:
    """A list of microseconds. Raises FormatError for any other."""
    entries = item.get(name)
    if (
        not isinstance(entries, list)
        or len(entries) != count
        or not all(fields.is_number(each) and 0 <= each < math.inf for each in entries)
    ):
        fields.refuse(where, name, f"{count} numbers, 0 or more", entries)
    return tuple(map(float, entries))


def _phases_from(where: str, item: dict[str, Any], steps: int) -> tuple[tuple[str, int], ...]:
    entries = item.get("phases")
    right = isinstance(entries, list) and all(
        isinstance(each, list) and len(each) == 2 and each[0] in _PHASES and type(each[1]) is int for each in entries
    )
    starts = [each[1] for each in entries] if right and isinstance(entries, list) else [-1]
    if starts != sorted(set(starts)) or starts[:1] != [0][: len(starts)] or max(starts, default=0) >= max(steps, 1):
        fields.refuse(where, "phases", f"[phase, first step] from step 0 on, below {steps}", entries)
    return tuple((each[0], each[1]) for each in item["phases"])


@dataclass(frozen=True, slots=True)
class Provenance:
    lowtide: str  # version
    torch: str  # version
    device: str  # "cpu", "cuda:0"
    python: str  # version
    threads: int  # of torch, within an operator


@dataclass(frozen=True, eq=False)
class Decision:
    """What a program follows from: a graph, of numbers or over dimensions, in what order it runs, and what works in place."""

    graph: Graph
    order: tuple[int, ...]  # indices into graph.nodes, by step
    reuses: tuple[int, ...]  # by node: which of its `inplace` candidates' memory it takes over, -1 for none

    @classmethod
    def in_order(cls, graph: Graph, order: Sequence[int] | None = None) -> Decision:
        """A graph that runs as it is written, or in an order; nothing works in place."""
        return cls(graph, tuple(range(len(graph.nodes)) if order is None else order), (-1,) * len(graph.nodes))


@dataclass(frozen=True, eq=False)
class Contents(Decision):
    """What a plan holds. Plans are saved and printed by `plan.plan`."""

    workspace_bytes: tuple[int, ...]  # by node: what it needs while it runs beside inputs and results, 0 where none or unknown
    resident_bytes: int  # of the caller's, before and after
    peak_bytes: int  # promised, with what is resident
    eager_peak_bytes: int  # the same of the program as the user wrote it
    lower_bound_bytes: int  # no order needs less
    status: str  # of the order: "optimal", "feasible"
    solver: str  # with its settings
    provenance: Provenance
    cost_report: CostReport | None = None  # where a limit was asked for
    peak: Snapshot | None = None  # the first step at the peak; None where there are no steps, or nobody asked
    pinned_bytes: int = 0  # promised, of the host: of all buffers that copies there are given, which are kept from step to step
    host_bytes: int | None = None  # the limit of that, where one was asked for
    granule_bytes: int = 1  # that the device's allocator rounds every request up to
    program: str = ""  # what it is for: `program_hash` of the captured program; "" where text cannot hold that
    node_us: tuple[float, ...] = ()  # by node, 0 for copies to the host and back; empty where no limit was asked for
    issue_us: tuple[float, ...] = ()  # by node, what it takes the host to issue it; empty where the host itself computes
    eager: Timeline | None = None  # the program as the user wrote it
    first_steps: tuple[Contents, ...] = ()  # plans of the step's other programs: those that make the optimizer's state
    algebra: tuple[RuleReport, ...] = ()  # what rules did to the graph, exact ones or not
    measured_peak_bytes: int | None = None  # of a run of this plan, with what is resident; not saved, since it tells of a run
    allocated_bytes: int | None = None  # the most that PyTorch's allocator for a GPU will count, in a process with nothing else; not saved
    reserved_bytes: int | None = None  # the most that it will have of the device, by its simulation; None where that is no GPU
    measured_pinned_bytes: int | None = None  # what that run has had pinned on the host; not saved, either
    generated: tuple[GeneratedRegion, ...] = ()  # what its regions are on this machine; not saved, since another makes its own
