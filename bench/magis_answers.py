"""What a row of the table says of one search, and beside it what is known of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.magis_plan import Found
from bench.magis_workloads import EFFORT_NOTES, NOTES, Known, Limited
from bench.results import Results

_WHICH = ("workload", "network", "moves")
ANSWERS = (
    *_WHICH, "overhead_at_80", "overhead_at_40", "overhead_at_20", "proven_at_80", "proven_at_40", "wanted_at_80", "wanted_at_40",
    "share_at_plus_5", "share_at_plus_10", "least_share", "floor_share", "resident_share", "magis_at_80", "magis_at_40",
    "magis_at_plus_10", "magis_dominated", "eviction_at_80", "eviction_at_40", "eviction_saved", "failed",
)  # fmt: skip
EFFORT = (
    *_WHICH, "eager_peak_bytes", "kept_peak_bytes", "kept_us", "operators", "states", "states_per_s", "capture_s", "search_s",
    "planning_s", "planning_cpu_s",
)  # fmt: skip
_WITHIN = 0.0005  # figures of others are known to three places


def answered(found: Found) -> dict[str, Any]:
    """The answers of a frontier, and the effort."""
    effort = found.effort
    return {
        "overhead_at_80": found.overhead(0.8),
        "overhead_at_40": found.overhead(0.4),
        "overhead_at_20": found.overhead(0.2),
        "proven_at_80": found.bounds[0.8],
        "proven_at_40": found.bounds[0.4],
        "share_at_plus_5": found.share(0.05),
        "share_at_plus_10": found.share(0.1),
        "least_share": min(peak_bytes for peak_bytes, _ in found.frontier) / found.eager_peak_bytes,
        "floor_share": effort.floor_bytes / found.eager_peak_bytes,
        "resident_share": found.resident_bytes / found.eager_peak_bytes,
        "eager_peak_bytes": found.eager_peak_bytes,
        "kept_peak_bytes": found.kept_peak_bytes,
        "kept_us": found.kept_us,
        "operators": effort.operators,
        "states": effort.states,
        "states_per_s": effort.states / effort.cpu_s,
        "capture_s": found.capture_s,
        "search_s": effort.seconds,
        "planning_s": found.planning_s,
        "planning_cpu_s": found.planning_cpu_s,
    }


def known_answers(found: Found, known: Known, network: str) -> dict[str, Any]:
    """What others reach, and at which of MAGIS's limits this search has a point with no more memory and no more time."""
    beaten = [limit for limit, reached in known.magis.items() if dominates(found, reached)]
    return {
        "magis_at_80": _text(known.magis.get("80 %")),
        "magis_at_40": _text(known.magis.get("40 %")),
        "magis_at_plus_10": _text(known.magis.get("+10 %")),
        "magis_dominated": f"{len(beaten)} of {len(known.magis)}: {', '.join(beaten) or 'none'}" if known.magis else None,
        **(_evicted(found, known.eviction) if network == known.evicted else {}),
    }


def _evicted(found: Found, eviction: Mapping[float, float]) -> dict[str, float]:
    """Eviction's overheads, and what share of them is saved."""
    row = {f"eviction_at_{share:.0%}".rstrip("%"): taken for share, taken in eviction.items()}
    ratios = [overhead / taken for share, taken in eviction.items() if (overhead := found.overhead(share)) is not None]
    return row | ({"eviction_saved": 1 - sum(ratios) / len(ratios)} if len(ratios) == len(eviction) else {})


def dominates(found: Found, reached: Limited) -> bool:
    """Whether a point of the frontier takes no more memory and no more time than what somebody reached."""
    overhead = found.overhead(reached.share + _WITHIN)
    return overhead is not None and overhead <= reached.overhead + _WITHIN


def tables(rows: Sequence[Mapping[str, Any]]) -> tuple[Results, Results]:
    """The answers, and the effort, of all rows."""
    answers, effort = (tuple({name: row[name] for name in columns if name in row} for row in rows) for columns in (ANSWERS, EFFORT))
    return (
        Results("magis", "MAGIS's workloads on rtx3090", ANSWERS, answers, NOTES),
        Results("magis_effort", "The same: what it took", EFFORT, effort, EFFORT_NOTES),
    )


def _text(reached: Limited | None) -> str | None:
    return None if reached is None else f"{reached.share:.3f} (+{reached.overhead:.1%})"
