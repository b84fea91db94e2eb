"""What to say when no plan was found that fits: how much would, what is resident, what stands there, what would help."""

from __future__ import annotations

from dataclasses import replace

from lowtide.base.units import bytes_text
from lowtide.errors import BudgetError
from lowtide.ir.graph import Kind
from lowtide.plan.kinds import kinds_text
from lowtide.plan.plan import CostReport, Plan
from lowtide.plan.snapshot import Snapshot
from lowtide.plan.summary import snapshot_lines

_NAMED = 4  # lines of tensors
_OFFERED = 3  # points of the frontier


def refusal(leanest: Plan, memory_bytes: int, more: str = "") -> BudgetError:
    """The error where `leanest`, a plan with its peak and cost report, still takes more than `memory_bytes`; `more` would help, too."""
    assert leanest.peak is not None, "what stands in the way is known"
    assert leanest.cost_report is not None, "and what would fit"
    lines = [
        f"memory: expected at least {leanest.peak_bytes} bytes ({bytes_text(leanest.peak_bytes)}), the smallest peak that was found, "
        f"{_share(leanest.peak_bytes, leanest.eager_peak_bytes)}; got {memory_bytes} bytes ({bytes_text(memory_bytes)})",
        f"resident throughout: {bytes_text(leanest.resident_bytes)}: {kinds_text(_own(leanest.peak))}",
        *snapshot_lines(_made(leanest.peak), most=_NAMED),
        f"what would help: {_offers(leanest.cost_report)}; or a smaller batch{_accumulate(leanest)}{more}",
    ]
    if leanest.cost_report.stopped:
        lines.append(f"the search was ended early ({leanest.cost_report.stopped}): with more time it may find a smaller peak")
    return BudgetError("\n".join(lines), smallest_peak_bytes=leanest.peak_bytes)


def _own(peak: Snapshot) -> dict[Kind, int]:
    """Bytes of the caller's by kind, which no plan can let go of."""
    return {kind: nbytes for kind, nbytes in peak.by_kind.items() if kind.caller_owned}


def _made(peak: Snapshot) -> Snapshot:
    """The snapshot with what the step itself makes; with all where that is nothing."""
    made = tuple(tensor for tensor in peak.tensors if not tensor.kind.caller_owned)
    return replace(peak, tensors=made or peak.tensors)


def _offers(report: CostReport) -> str:
    """What was planned, as arguments: the least, the one in the middle of the frontier, and the one without recomputation."""
    points = report.frontier
    places = sorted({round(piece * (len(points) - 1) / (_OFFERED - 1)) for piece in range(_OFFERED)})
    offers = ((peak, us / report.order_us - 1) for peak, us in (points[place] for place in places))
    return ", ".join(f"memory={peak} ({bytes_text(peak)}) at {slower:+.1%} time" for peak, slower in offers)


def _share(nbytes: int, eager_bytes: int) -> str:
    return f"{nbytes / eager_bytes:.0%} of eager's {bytes_text(eager_bytes)}" if eager_bytes else "eager's own"


def _accumulate(plan: Plan) -> str:
    """Micro-batches are for training alone."""
    trains = any(value.storage.kind is Kind.GRADIENT for node in plan.graph.nodes for value in node.results)
    return ", or micro-batches (Training(accumulate=2)): lowtide.explain(...) says what these would do" if trains else ""
