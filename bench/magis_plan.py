"""One training step planned on the machine of MAGIS's evaluation: its frontier, and the effort."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lowtide
from bench.models.workload import Entry, plain_sgd
from lowtide import BudgetError, optimize
from lowtide.api.step import Step
from lowtide.remat.problem import RematProblem
from lowtide.remat.sweep import Archive, Sweep

DEVICE = "rtx3090"
SHARES = (0.8, 0.4)  # of eager's peak
_POINTS = 200  # of a frontier that are kept for its plot


@dataclass(frozen=True)
class Effort:
    """What one search had to do with, and what it did."""

    operators: int  # of the captured step, without views
    states: int  # schedules built and costed
    seconds: float
    cpu_s: float
    floor_bytes: int  # of any schedule that leaves the caller's own where it is


@dataclass(frozen=True)
class Timed(Sweep):
    """A sweep that notes its effort. No clock ends it, so that a busy machine finds what an idle one does."""

    max_seconds: float = 3600.0
    notes: list[Effort] = field(default_factory=list, compare=False)

    def explore(self, problems: Sequence[RematProblem], *args: Any, **settings: Any) -> Archive:
        clocks = _clocks()
        archive = super().explore(problems, *args, **settings)
        spent, operators = _since(clocks), int((~problems[0].is_view).sum())
        self.notes.append(Effort(operators, archive.states, *spent, min(map(_floor_bytes, problems))))
        return archive


def _floor_bytes(problem: RematProblem) -> int:
    """What any schedule takes that leaves the caller's own where it is: that, and the arguments and results of the largest operator."""
    base = problem.problem
    needs = [0]
    for node in range(base.node_count):
        read = base.read_ids[base.read_ptr[node] : base.read_ptr[node + 1]]
        in_place = base.tensor_bytes[base.take_output[node]] if base.take_ptr[node] < base.take_ptr[node + 1] else 0
        needs.append(int(base.tensor_bytes[read].sum() + base.made_bytes[node] + base.workspace_bytes[node] - in_place))
    return int(base.resident_bytes) + max(needs)


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(then: tuple[float, float]) -> tuple[float, float]:
    """Seconds by the wall's clock and of the processor."""
    return time.perf_counter() - then[0], time.process_time() - then[1]


@dataclass(frozen=True)
class Found:
    """What a search found. The time of 1 is that without recomputation, the share of 1 is eager PyTorch's peak, parameters included."""

    eager_peak_bytes: int
    kept_peak_bytes: int  # the least without recomputation
    resident_bytes: int
    kept_us: float
    frontier: Sequence[tuple[int, float]]
    planning_s: float  # all of it, from the model to the checked plan
    planning_cpu_s: float
    capture_s: float
    effort: Effort
    bounds: Mapping[float, float | None]  # by share of the peak: what nothing takes less than in as much memory as the plan there

    def overhead(self, share: float) -> float | None:
        """The least time within a share of the peak, as a share of the time without recomputation; None where nothing fits."""
        times = [time_us for peak_bytes, time_us in self.frontier if peak_bytes <= share * self.eager_peak_bytes]
        return min(times) / self.kept_us - 1 if times else None

    def share(self, overhead: float) -> float:
        """The least share of the peak in no more time than that."""
        return min(peak_bytes for peak_bytes, time_us in self.frontier if time_us <= (1 + overhead) * self.kept_us) / self.eager_peak_bytes

    def shares(self) -> list[tuple[float, float]]:
        """The frontier as shares of the peak and overheads; of a long one some points, evenly."""
        every = max(1, -(-len(self.frontier) // _POINTS))
        points = [*self.frontier[::every], *self.frontier[-1:]]
        return [(round(peak_bytes / self.eager_peak_bytes, 4), round(time_us / self.kept_us - 1, 5)) for peak_bytes, time_us in points]


def plan(entry: Entry, batch_size: int, *, swap: bool = False, parts: bool = False, search: Timed | None = None) -> Found:
    """Plan one step of a model, without memory for it.

    `swap` also lets tensors go to the host and back, `parts` lets operators run in parts and be rewritten (`exact=False`).
    """
    made, search = entry.build(batch_size, "meta"), search or Timed()
    clocks = _clocks()
    step = optimize(
        made.model,
        made.batch,
        loss=made.loss,
        optimizer=plain_sgd(made.model),
        planning=lowtide.Planning(simulate=DEVICE, search=search, progress=False),
        latency=1.1,
        run=lowtide.Run(swap=swap),
        exact=not parts,
    )
    (planning_s, planning_cpu_s), report = _since(clocks), step.plan.cost_report
    assert report is not None
    return Found(
        eager_peak_bytes=step.plan.eager_peak_bytes,
        kept_peak_bytes=report.order_peak_bytes,
        resident_bytes=step.plan.resident_bytes,
        kept_us=report.order_us,
        frontier=report.frontier,
        planning_s=planning_s,
        planning_cpu_s=planning_cpu_s,
        capture_s=step.seconds["capture"],
        effort=search.notes[-1],
        bounds={share: _bound(step, int(share * step.plan.eager_peak_bytes)) for share in SHARES},
    )


def _bound(step: Step, memory_bytes: int) -> float | None:
    """The time that is proven within the peak of the plan for a limit, over that without recomputation; None where nothing fits."""
    try:
        report = step.at(memory_bytes).plan.cost_report
    except BudgetError:
        return None
    assert report is not None
    return max(0.0, report.time_bound_us / report.order_us - 1)
