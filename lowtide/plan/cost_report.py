"""What a plan gives for what: time for memory, in all and tensor by tensor; what rules of algebra bought; what generated kernels spare."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lowtide.base import fields
from lowtide.base.messages import bytes_text, time_text
from lowtide.ir.graph import Graph
from lowtide.plan.snapshot import LiveTensor, StorageSpec, specs_by_name, tensor_from

_RULE_LOCATION = "algebra"
_RULE_KEYS = ("rule", "held", "held_bytes", "peak_bytes", "cost_us")  # in a plan's file


@dataclass(frozen=True, slots=True)
class RuleReport:
    """One rule, at all places at which it was applied."""

    rule: str
    storages: tuple[str, ...]  # by place: the storage that was held for the backward pass, by its name in the captured graph
    held_bytes: int  # of all of them, less what is held in their place
    peak_bytes: int  # so much of that at the step that would be the peak
    cost_us: float  # what it takes more than what it replaces, below 0 for less

    def rows(self) -> dict[str, Any]:
        return dict(zip(_RULE_KEYS, (self.rule, list(self.storages), self.held_bytes, self.peak_bytes, self.cost_us), strict=True))


def rule_reports_from(item: Any) -> tuple[RuleReport, ...]:
    """The reports that `RuleReport.rows` wrote. Raises FormatError for what cannot be any."""
    if not isinstance(item, list):
        fields.refuse("plan", _RULE_LOCATION, "a list", item)
    return tuple(_from(f"plan: {_RULE_LOCATION}: {position}", each) for position, each in enumerate(item))


def _from(where: str, item: Any) -> RuleReport:
    fields.check_fields(where, item, set(_RULE_KEYS))
    storages, cost_us = item.get("held"), fields.number(where, "cost_us", item.get("cost_us"), -math.inf)
    if not isinstance(storages, list) or not storages or not all(isinstance(name, str) for name in storages):
        fields.refuse(where, "held", "names of storages", storages)
    held_bytes, peak_bytes = fields.integer(where, item, "held_bytes"), fields.integer(where, item, "peak_bytes")
    return RuleReport(fields.string(where, item, "rule"), tuple(storages), held_bytes, peak_bytes, cost_us)


_MOST = 12  # kinds of kernels that are told of a region


@dataclass(frozen=True, slots=True)
class Kernel:
    scheme: str  # "rows through a ring", "register tiles", ..
    operators: tuple[str, ...]  # that it does, in order: "convolution", "relu"


@dataclass(frozen=True, slots=True)
class GeneratedRegion:
    name: str  # of its first result
    kernels: tuple[Kernel, ...]  # in the order in which they run
    arena_bytes: int  # that lies between kernels
    packed_bytes: int  # of constants as kernels read them
    us: float | None  # measured beside torch's operators; None where it was not measured here
    torch_us: float | None
    by: str = ""  # another compiler


def generated_lines(regions: Sequence[GeneratedRegion]) -> list[str]:
    """Regions, and the kinds of their kernels, the most frequent first."""
    own = [region for region in regions if not region.by]
    lines = [line for region in own for line in (_region_line(region), *_kernel_lines(region.kernels))]
    others = [region for region in regions if region.by]
    return [*lines, _compiled_line(others), *_kernel_lines([each for region in others for each in region.kernels])] if others else lines


def _compiled_line(regions: Sequence[GeneratedRegion]) -> str:
    operators = sum(len(kernel.operators) for region in regions for kernel in region.kernels)
    times = ""
    if all(region.us is not None and region.torch_us is not None for region in regions):
        us, torch_us = sum(region.us or 0 for region in regions), sum(region.torch_us or 0 for region in regions)
        times = f"; alone they take {time_text(us)}, by torch {time_text(torch_us)}"
    return f"compiled by {regions[0].by}: {operators} operators in {len(regions)} regions{times}"


def _region_line(region: GeneratedRegion) -> str:
    times = "" if region.us is None or region.torch_us is None else f"; {time_text(region.us)}, by torch {time_text(region.torch_us)}"
    sizes = f"{bytes_text(region.arena_bytes)} between them, {bytes_text(region.packed_bytes)} of packed constants"
    operators = sum(len(kernel.operators) for kernel in region.kernels)
    return f"generated: {operators} operators as {len(region.kernels)} kernels up to {region.name}, {sizes}{times}"


def _kernel_lines(kernels: Sequence[Kernel]) -> list[str]:
    kinds = Counter(kernels).most_common()
    lines = [f"{count:>14}  {kernel.scheme}: {', '.join(kernel.operators) or 'copy'}" for kernel, count in kinds[:_MOST]]
    rest = sum(count for _, count in kinds[_MOST:])
    return [*lines, f"{rest:>14}  more, of {len(kinds) - _MOST} kinds"] if rest else lines


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
        ways = [deed for deed, done in (("computed again", self.runs or not self.load_us), ("stored and loaded", self.load_us)) if done]
        return ", ".join(ways)

    def rows(self) -> dict[str, Any]:
        """What JSON keeps of it: the rest is in the graph."""
        spans, costs = [list(span) for span in self.away], {name: getattr(self, name) for name in ("at_peak", "runs", *_TIMES)}
        return {"tensor": self.tensor.row(), "away": spans} | costs


class FrontierPoint(NamedTuple):
    peak_bytes: int
    time_us: float


class HostPoint(NamedTuple):
    """What a plan takes that keeps to the device's memory as this one does."""

    pinned_bytes: int
    time_us: float


@dataclass(frozen=True, slots=True)
class CostReport:
    """What a plan under a limit of memory or time gives for what. Times are by the cost model, of one run of all operators."""

    runs: tuple[int, ...] = field(repr=False)  # the sequence over the graph without recomputation, see `remat.entries`
    time_us: float
    order_us: float  # the same without recomputation
    order_peak_bytes: int  # the least peak without recomputation
    recomputed: int  # runs that repeat a node
    frontier: tuple[FrontierPoint, ...] = field(repr=False)  # of all that was found and is best at something, leanest first
    evictions: tuple[Eviction, ...] = field(default=(), repr=False)  # every tensor that is evicted and restored, the largest first
    time_bound_us: float = 0.0  # no sequence of any graph that was tried takes less within the plan's peak; 0 where nothing is proven
    stopped: str = ""  # what ended the search before its effort was spent: "max_seconds", "interrupted"; "" where nothing did
    # What memory of the host buys within the device's, least first; none where nothing is pinned.
    host_frontier: tuple[HostPoint, ...] = field(default=(), repr=False)

    def added(self, time_us: float) -> str:
        """What a time adds to that without recomputation, "+12.5%"; "" where nothing is known of that."""
        return f"{time_us / self.order_us - 1:+.1%}" if self.order_us else ""

    def rows(self) -> dict[str, Any]:
        entries = {name: getattr(self, name) for name in self.__slots__ if name not in ("evictions", "stopped", "host_frontier")}
        entries |= {"host_frontier": self.host_frontier} if self.host_frontier else {}
        return (
            entries | {"evictions": [eviction.rows() for eviction in self.evictions]} | ({"stopped": self.stopped} if self.stopped else {})
        )


def cost_report_from(item: Any, graph: Graph) -> CostReport:
    """The cost report that `CostReport.rows` wrote, of this graph. Raises FormatError for what cannot be one."""
    fields.check_fields(_WHERE, item, set(CostReport.__slots__))
    evictions = item.get("evictions")
    if not isinstance(evictions, list):
        fields.refuse(_WHERE, "evictions", "a list", evictions)
    known, steps = specs_by_name(graph), len(graph.nodes)
    return CostReport(
        runs=fields.integers(_WHERE, item, "runs"),
        time_us=fields.number(_WHERE, "time_us", item.get("time_us")),
        order_us=fields.number(_WHERE, "order_us", item.get("order_us")),
        order_peak_bytes=fields.count(_WHERE, item, "order_peak_bytes"),
        recomputed=fields.count(_WHERE, item, "recomputed"),
        frontier=tuple(FrontierPoint(*pair) for pair in _bytes_and_times(item, "frontier")),
        evictions=tuple(_eviction(f"{_WHERE}: eviction {index}", eviction, known, steps) for index, eviction in enumerate(evictions)),
        time_bound_us=fields.number(_WHERE, "time_bound_us", item.get("time_bound_us", 0.0)),
        stopped=fields.string(_WHERE, item, "stopped") if "stopped" in item else "",
        host_frontier=tuple(HostPoint(*pair) for pair in _bytes_and_times(item, "host_frontier")) if "host_frontier" in item else (),
    )


def _bytes_and_times(item: dict[str, Any], name: str) -> list[tuple[int, float]]:
    pairs = item.get(name)
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        fields.refuse(_WHERE, name, "a list of pairs", pairs)
    return [(fields.count(_WHERE, {"bytes": nbytes}, "bytes"), fields.number(_WHERE, "us", us)) for nbytes, us in pairs]


def _eviction(where: str, item: Any, known: Mapping[str, StorageSpec], steps: int) -> Eviction:
    fields.check_fields(where, item, {"tensor", "away", "at_peak", "runs", *_TIMES})
    tensor, away = tensor_from(where, item.get("tensor"), known, steps), fields.pairs(where, item, "away")
    borders = [tensor.start, *(step for span in away for step in span), tensor.end]
    if borders != sorted(borders) or any(start == end for start, end in away):
        fields.refuse(where, "away", "spans of steps within the tensor's life, one after another", item.get("away"))
    times = (fields.number(where, name, item.get(name)) for name in _TIMES)
    return Eviction(tensor, away, fields.boolean(where, item, "at_peak"), fields.count(where, item, "runs"), *times)
