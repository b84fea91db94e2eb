"""What to say when no plan fits: how much would, what stands in the way, what would help."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.base.units import bytes_text, op_text
from lowtide.errors import BudgetError
from lowtide.ir.graph import Kind
from lowtide.plan.plan import Plan, Trade
from lowtide.plan.snapshot import LiveTensor, Moment
from lowtide.plan.where import place_text

_NAMED = 5  # tensors
_OFFERED = 3  # points of the frontier


def refusal(leanest: Plan, memory_bytes: int) -> BudgetError:
    """The error where `leanest`, a plan with its peak and trade, still takes more than `memory_bytes`."""
    assert leanest.peak is not None, "what stands in the way is known"
    assert leanest.trade is not None, "and what would fit"
    if leanest.resident_bytes > memory_bytes:
        help_ = "raise `memory`, or hold less: a smaller model, a smaller data type, an optimizer with less state, a smaller batch"
    else:
        help_ = f"raise `memory` ({_offers(leanest.trade)}), make the batch smaller{_accumulate(leanest)}"
    return BudgetError(
        f"memory: expected at least {leanest.peak_bytes} bytes ({bytes_text(leanest.peak_bytes)}), the smallest peak that was found, "
        f"{_share(leanest.peak_bytes, leanest.eager_peak_bytes)}, of which {bytes_text(leanest.resident_bytes)} are the caller's own; "
        f"got {memory_bytes} bytes ({bytes_text(memory_bytes)}). {_in_the_way(leanest.peak)}. What would help: {help_}",
        smallest_peak_bytes=leanest.peak_bytes,
    )


def _in_the_way(peak: Moment) -> str:
    where = place_text(peak.source)
    names = "; ".join(map(_named, _own_first(peak.tensors)[:_NAMED]))
    return f"In the way at step {peak.step} of {peak.steps} ({peak.op}{f' of {where}' if where else ''}): {names}"


def _own_first(tensors: Sequence[LiveTensor]) -> list[LiveTensor]:
    """What the step itself makes before what the caller holds, which no plan can let go of."""
    return sorted(tensors, key=lambda tensor: tensor.kind.caller_owned)


def _named(tensor: LiveTensor) -> str:
    where = place_text(tensor.source)
    made = f" by {op_text(tensor.op)} of {where}" if where else ""
    shape = ", ".join(map(str, tensor.shape))
    return f"{bytes_text(tensor.nbytes)} {tensor.name} {tensor.dtype}[{shape}] ({tensor.kind.value}{made})"


def _offers(trade: Trade) -> str:
    """What some amounts would cost: the least, the one in the middle of the frontier, and the one without recomputation."""
    points = trade.frontier
    places = sorted({round(part * (len(points) - 1) / (_OFFERED - 1)) for part in range(_OFFERED)})
    texts = [f"{bytes_text(peak)} fits at {us / trade.kept_us - 1:+.1%} time" for peak, us in (points[place] for place in places)]
    return ", ".join(texts)


def _share(nbytes: int, eager_bytes: int) -> str:
    return f"{nbytes / eager_bytes:.0%} of eager's {bytes_text(eager_bytes)}" if eager_bytes else "eager's own"


def _accumulate(plan: Plan) -> str:
    """Micro-batches are for training alone."""
    trains = any(value.storage.kind is Kind.GRADIENT for node in plan.graph.nodes for value in node.results)
    return ", or cut it into micro-batches with `accumulate`" if trains else ""
