"""What a plan under a limit gives for what: time for memory, in all and tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lowtide.base import fields
from lowtide.ir.graph import Graph
from lowtide.plan.snapshot import LiveTensor, StorageSpec, specs_by_name, tensor_from

_WHERE = "plan: cost_report"
_TIMES = ("run_us", "store_us", "load_us")


@dataclass(frozen=True, slots=True)
class Eviction:
    """One tensor that is not held all the while it is wanted: what its eviction buys, and what its return costs."""

    tensor: LiveTensor  # as the plan's graph names its first copy; its life is from that copy's start to the last use of the last one
    away: tuple[tuple[int, int], ...]  # the steps [start, end) over which no copy of it is there; none where it is made again for nothing
    at_peak: bool  # away at the step at which these operators would peak if nothing were repeated or moved
    runs: int  # operators that run once more for it
    run_us: float  # and their time
    store_us: float  # of the link to the host; it works beside the operators
    load_us: float  # of the link from the host, alike

    @property
    def how(self) -> str:
        ways = [way for way, done in (("computed again", self.runs or not self.load_us), ("stored and loaded", self.load_us)) if done]
        return ", ".join(ways)

    def rows(self) -> dict[str, Any]:
        """What JSON keeps of it: the rest is in the graph."""
        spans, costs = [list(span) for span in self.away], {name: getattr(self, name) for name in ("at_peak", "runs", *_TIMES)}
        return {"tensor": self.tensor.row(), "away": spans} | costs


class FrontierPoint(NamedTuple):
    """What one plan takes."""

    peak_bytes: int
    time_us: float


@dataclass(frozen=True, slots=True)
class CostReport:
    """What a plan under a limit of memory or time gives for what. Times are by the cost model, of one run of all operators."""

    runs: tuple[int, ...]  # the sequence over the graph without recomputation, see `remat.entries`
    time_us: float
    order_us: float  # the same without recomputation
    order_peak_bytes: int  # the least peak without recomputation
    recomputed: int  # runs that repeat a node
    frontier: tuple[FrontierPoint, ...]  # of all that was found and is best at something, leanest first
    evictions: tuple[Eviction, ...] = ()  # every tensor that is evicted and restored, the largest first
    time_bound_us: float = 0.0  # no sequence of any graph that was tried takes less within the plan's peak; 0 where nothing is proven
    stopped: str = ""  # what ended the search before its effort was spent: "max_seconds", "interrupted"; "" where nothing did

    def rows(self) -> dict[str, Any]:
        entries = {name: getattr(self, name) for name in self.__slots__ if name not in ("evictions", "stopped")}
        return (
            entries | {"evictions": [eviction.rows() for eviction in self.evictions]} | ({"stopped": self.stopped} if self.stopped else {})
        )


def cost_report_from(item: Any, graph: Graph) -> CostReport:
    """The cost report that `CostReport.rows` wrote, of this graph. Raises FormatError for what cannot be one."""
    fields.check_fields(_WHERE, item, set(CostReport.__slots__))
    frontier, evictions = item.get("frontier"), item.get("evictions")
    if not isinstance(frontier, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in frontier):
        fields.refuse(_WHERE, "frontier", "a list of pairs", frontier)
    if not isinstance(evictions, list):
        fields.refuse(_WHERE, "evictions", "a list", evictions)
    known, steps = specs_by_name(graph), len(graph.nodes)
    return CostReport(
        runs=fields.integers(_WHERE, item, "runs"),
        time_us=_number(_WHERE, item, "time_us"),
        order_us=_number(_WHERE, item, "order_us"),
        order_peak_bytes=_count(_WHERE, item, "order_peak_bytes"),
        recomputed=_count(_WHERE, item, "recomputed"),
        frontier=tuple(FrontierPoint(_count(_WHERE, {"bytes": peak}, "bytes"), _number(_WHERE, {"us": us}, "us")) for peak, us in frontier),
        evictions=tuple(_eviction(f"{_WHERE}: eviction {index}", eviction, known, steps) for index, eviction in enumerate(evictions)),
        time_bound_us=_number(_WHERE, item, "time_bound_us") if "time_bound_us" in item else 0.0,
        stopped=fields.string(_WHERE, item, "stopped") if "stopped" in item else "",
    )


def _eviction(where: str, item: Any, known: Mapping[str, StorageSpec], steps: int) -> Eviction:
    fields.check_fields(where, item, {"tensor", "away", "at_peak", "runs", *_TIMES})
    tensor, away = tensor_from(where, item.get("tensor"), known, steps), fields.pairs(where, item, "away")
    borders = [tensor.start, *(step for span in away for step in span), tensor.end]
    if borders != sorted(borders) or any(start == end for start, end in away):
        fields.refuse(where, "away", "spans of steps within the tensor's life, one after another", item.get("away"))
    return Eviction(
        tensor, away, fields.boolean(where, item, "at_peak"), _count(where, item, "runs"), *(_number(where, item, name) for name in _TIMES)
    )


def _number(where: str, item: dict[str, Any], name: str) -> float:
    number = item.get(name)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < math.inf:
        fields.refuse(where, name, "a number, 0 or more", number)
    return float(number)


def _count(where: str, item: dict[str, Any], name: str) -> int:
    count = fields.integer(where, item, name)
    return count if count >= 0 else fields.refuse(where, name, "0 or more", count)
