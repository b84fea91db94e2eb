"""A plan in a few lines for people: what it promises, what was measured, what was done, what is proven."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.ir.plan import Plan, Trade

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def summarize(plan: Plan) -> str:
    """The summary table of a plan; peaks include what the caller holds throughout."""
    rows = [
        ("", "eager", "lowtide", ""),
        ("promised peak", bytes_text(plan.eager_peak_bytes), bytes_text(plan.peak_bytes), _saving(plan)),
        ("measured peak", "", _measured(plan), ""),
        ("  of which the caller's own", bytes_text(plan.resident_bytes), bytes_text(plan.resident_bytes), ""),
        ("no order needs less than", "", bytes_text(plan.lower_bound_bytes), _gap(plan)),
    ]
    if plan.trade is not None:
        rows.append(("promised time", "", f"{plan.trade.time_us / 1e3:.2f} ms", _slower(plan.trade)))
    table = [f"{label:<28}{eager:>12}{own:>14}  {note}".rstrip() for label, eager, own, note in rows]
    return "\n".join([*table, f"{_deeds(plan)}; found by {plan.solver}"])


def bytes_text(nbytes: int) -> str:
    """A size for people: "12.34 MiB"; exact below a KiB. KiB = 2^10, MiB = 2^20, GiB = 2^30 bytes."""
    for unit, size in _UNITS:
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


def _saving(plan: Plan) -> str:
    return f"{1 - plan.peak_bytes / plan.eager_peak_bytes:.1%} less" if plan.eager_peak_bytes else ""


def _measured(plan: Plan) -> str:
    return "not yet" if plan.measured_peak_bytes is None else bytes_text(plan.measured_peak_bytes)


def _gap(plan: Plan) -> str:
    if plan.peak_bytes == plan.lower_bound_bytes:
        return "proven least"
    gap_bytes = plan.peak_bytes - plan.lower_bound_bytes
    return f"gap {bytes_text(gap_bytes)}, {gap_bytes / plan.peak_bytes:.1%}"


def _slower(trade: Trade) -> str:
    if not trade.recomputed:
        return "nothing computed again"
    return f"{trade.time_us / trade.kept_us - 1:+.1%}; by order alone the peak is {bytes_text(trade.kept_peak_bytes)}"


def _deeds(plan: Plan) -> str:
    moved = sum(1 for before, after in zip(plan.order, plan.order[1:], strict=False) if after < before)
    in_place = sum(1 for slot in plan.takeovers if slot >= 0)
    again = f", {plan.trade.recomputed} computed again" if plan.trade is not None and plan.trade.recomputed else ""
    return f"{len(plan.order)} operators, {moved} brought forward, {in_place} in the memory of an input{again}"
