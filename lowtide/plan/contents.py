"""What a plan holds: a graph, what was decided about it, what that promises, and how it came about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lowtide.ir.graph import Graph
from lowtide.plan.cost_report import CostReport, GeneratedRegion, RuleReport
from lowtide.plan.snapshot import Snapshot
from lowtide.plan.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Provenance:
    """With what a plan was made."""

    lowtide: str  # version
    torch: str  # version
    device: str  # "cpu", "cuda:0"
    python: str  # version
    threads: int  # of torch, within an operator


class Decision(Protocol):
    """What a program follows from: a graph, of numbers or over dimensions, in what order it runs, and what works in place."""

    @property
    def graph(self) -> Graph:
        """What runs."""

    @property
    def order(self) -> tuple[int, ...]:
        """Indices into graph.nodes, by step."""

    @property
    def reuses(self) -> tuple[int, ...]:
        """By node: which of its `inplace` candidates' memory it takes over, -1 for none."""


@dataclass(frozen=True, eq=False)
class Contents:
    """What a plan holds. Plans are saved and printed by `plan.plan`."""

    graph: Graph
    order: tuple[int, ...]  # indices into graph.nodes, by step
    reuses: tuple[int, ...]  # by node: which of its `inplace` candidates' memory it takes over, -1 for none
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
    granule_bytes: int = 1  # that the device's allocator rounds every request up to
    program: str = ""  # what it is for: `program_hash` of the captured program; "" where text cannot hold that
    node_us: tuple[float, ...] = ()  # by node, 0 for copies to the host and back; empty where no limit was asked for
    issue_us: tuple[float, ...] = ()  # by node, what it takes the host to issue it; empty where the host itself computes
    eager: Timeline | None = None  # the program as the user wrote it
    first_steps: tuple[Contents, ...] = ()  # plans of the step's other programs: those that make the optimizer's state
    algebra: tuple[RuleReport, ...] = ()  # what rules did to the graph, exact ones or not
    measured_peak_bytes: int | None = None  # of a run of this plan, with what is resident; not saved, since it tells of a run
    generated: tuple[GeneratedRegion, ...] = ()  # what its regions are on this machine; not saved, since another makes its own
