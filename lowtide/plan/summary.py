"""A plan for people: what it promises, what was measured, what is proven, what stands at the peak, what was given for what.

What it runs part by part is told so, too: which operators, along what, into how many, and what that spares and takes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lowtide.base.messages import bytes_text, less_text, op_text, time_text
from lowtide.errors import CheckError, of_kind
from lowtide.ir.bodies import Loop, is_loop
from lowtide.ir.graph import Kind, Node
from lowtide.ir.operators.nodes import is_view, row_of
from lowtide.plan.contents import Contents
from lowtide.plan.cost_report import CostReport, Eviction, RuleReport, generated_lines
from lowtide.plan.promises import lives, peak_bytes
from lowtide.plan.snapshot import LiveTensor, Snapshot, source_text, storage_specs

T = TypeVar("T")

_NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")  # a whole part of a path or name
_LONGEST = 56  # of a name on a line


@dataclass(frozen=True)
class AlikeItems(Generic[T]):
    """Some that are alike, and the tensors that they are of."""

    members: tuple[T, ...]
    tensors: tuple[LiveTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def spec(self) -> str:
        """Dtype and shape, "float32[4, 32]", with the count of several: "12 x float32[4, 32]"."""
        texts = {tensor.dtype_and_shape for tensor in self.tensors}
        if len(texts) > 1:
            return f"{len(self.tensors)} of several shapes"
        return texts.pop() if len(self.tensors) == 1 else f"{len(self.tensors)} x {texts.pop()}"

    @property
    def origin(self) -> str:
        """What makes it and where, "gelu of blocks.*.mlp, model.py:12"; an input's name."""
        first = self.tensors[0]
        if not first.op:
            return _shortened(self._common([tensor.name for tensor in self.tensors]))
        module = self._common([tensor.module for tensor in self.tensors])
        line = source_text(first.source).removeprefix(f"{first.module}, ")
        return " of ".join(filter(None, (op_text(first.op), ", ".join(filter(None, (_shortened(module), line))))))

    def _common(self, texts: list[str]) -> str:
        return texts[0] if len(set(texts)) == 1 else pattern(texts[0])


def alike(items: Iterable[T], tensor_of: Callable[[T], LiveTensor], key: Callable[[LiveTensor, T], Hashable]) -> list[AlikeItems[T]]:
    """The groups of those of one operator, at one place of repeated blocks, and of one `key`; the most bytes first."""
    by_key: defaultdict[Hashable, list[T]] = defaultdict(list)
    for item in items:
        tensor = tensor_of(item)
        by_key[tensor.op, pattern(tensor.module if tensor.op else tensor.name), key(tensor, item)].append(item)
    groups = [AlikeItems(tuple(members), tuple(map(tensor_of, members))) for members in by_key.values()]
    return sorted(groups, key=lambda group: -group.nbytes)


def pattern(path: str) -> str:
    """A path with its numbers left open: "blocks.*.mlp" of "blocks.3.mlp"; one of numbers alone stays as it is."""
    return _NUMBER.sub("*", path) if re.search(r"[^\d._]", path) else path


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"...{text[-_LONGEST + 3 :]}"


def live_tensors(plan: Contents) -> list[LiveTensor]:
    """Every storage that has bytes, by bytes, of equal ones the earliest; what is resident lives from the first step to the last."""
    spans, seen = lives(plan), storage_specs(plan.graph)
    tensors = [LiveTensor.of(seen[storage], nbytes, start, end) for storage, (nbytes, start, end) in spans.items() if nbytes]
    return sorted(tensors, key=lambda tensor: (-tensor.nbytes, tensor.start, tensor.end, tensor.name))


def table(plan: Contents, most: int | None = None) -> str:
    """The first `most` of them, all where that is None, a line each: bytes, name, dtype and shape, kind, steps, and what makes it."""
    tensors = live_tensors(plan)
    rows = [("bytes", "name", "tensor", "kind", "steps", "made by"), *map(_row, tensors[:most])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"{row[0]:>{widths[0]}}  " + "  ".join(map(str.ljust, row[1:], widths[1:])) for row in rows]
    rest = tensors[most:] if most is not None else []
    if rest:
        lines.append(f"{bytes_text(sum(tensor.nbytes for tensor in rest)):>{widths[0]}}  in {len(rest)} more")
    return "\n".join(line.rstrip() for line in lines)


def _row(tensor: LiveTensor) -> tuple[str, ...]:
    steps = f"{tensor.start} to {tensor.end}"
    return bytes_text(tensor.nbytes), tensor.name, tensor.dtype_and_shape, tensor.kind.value, steps, tensor.made_by


_LINES = 6


@dataclass(frozen=True, slots=True)
class PlannedSplit:
    """One set of operators that runs part by part."""

    where: str  # the module and line of the operator that computes the most, "lm_head, model.py:12"
    operators: tuple[str, ...]  # of a part, views apart, in their order
    dimension: str  # "tokens"
    extent: int
    part: int  # of the extent, but for the last, which may be smaller
    part_bytes: int  # that a part makes for itself at its highest, without operators' own workspaces
    whole_bytes: int  # that the same nodes make in one part
    us: float  # of all parts; 0 where times do not matter

    @property
    def parts(self) -> int:
        return -(-self.extent // self.part)


def splits_of(plan: Contents) -> tuple[PlannedSplit, ...]:
    """The loops of a plan, in the order in which they run."""
    return tuple(
        _split(plan.graph.nodes[index], plan.granule_bytes, plan.node_us[index] if plan.node_us else 0.0)
        for index in plan.order
        if is_loop(plan.graph.nodes[index])
    )


def split_lines(plan: Contents) -> list[str]:
    """A line for each, those of repeated blocks together; none where nothing is split."""
    groups: defaultdict[tuple[object, ...], list[PlannedSplit]] = defaultdict(list)
    for each in splits_of(plan):
        groups[pattern(each.where), each.operators, each.dimension, each.extent, each.part].append(each)
    lines = [_line(group) for group in sorted(groups.values(), key=lambda group: group[0].part_bytes - group[0].whole_bytes)]
    rest = [f"{'':>14}  in {len(lines) - _LINES} more kinds"] if len(lines) > _LINES else []
    return ["run part by part, in place of at once:", *lines[:_LINES], *rest] if lines else []


def _line(group: Sequence[PlannedSplit]) -> str:
    first, count = group[0], f"{len(group)} x " if len(group) > 1 else ""
    names = [op_text(op) for op in first.operators]
    what = f"{names[0]} to {names[-1]}, {len(names)} operators" if len(names) > 2 else " and ".join(names)
    took = f"; {time_text(sum(each.us for each in group))}" if any(each.us for each in group) else ""
    where = f" of {pattern(first.where) if len(group) > 1 else first.where}" if first.where else ""
    return (
        f"{bytes_text(first.part_bytes):>14}  where the whole takes {bytes_text(first.whole_bytes)}: {count}{what}{where}, along "
        f"{first.dimension} ({first.extent}) in {first.parts} parts of {first.part}{took}"
    )


def _split(node: Node, granule_bytes: int, us: float) -> PlannedSplit:
    loop = Loop.of(node)
    whole, part = loop.at_any(of_kind(int, loop.extent)), loop.at(loop.part)
    nodes = [each for each in part.nodes if not is_view(each)]
    heaviest = max(nodes, key=_flops)
    return PlannedSplit(
        source_text(heaviest.source or node.source),
        tuple(each.op for each in nodes),
        loop.body.dimensions[0].name,
        loop.extent,
        loop.part,
        peak_bytes(part, granule_bytes),
        peak_bytes(whole, granule_bytes),
        us,
    )


def _flops(node: Node) -> int:
    count = row_of(node.op).flops
    try:
        return 0 if count is None else count(node)
    except CheckError:
        return 0


_TENSORS, _EVICTIONS = 5, 7  # lines of each
_HOST_POINTS = 4  # of what the host's memory buys
_LEAST_GAP = 1e-5  # share of the time below which a gap is the rounding of sums
_LEAST_SHARE = 1e-3  # share of the time from which on a rest is told


def summarize(plan: Contents) -> str:
    """The summary of a plan; peaks include what the caller holds throughout."""
    measured = "not yet" if plan.measured_peak_bytes is None else bytes_text(plan.measured_peak_bytes)
    rows = [
        ("", "eager", "lowtide", ""),
        (
            "promised peak",
            bytes_text(plan.eager_peak_bytes),
            bytes_text(plan.peak_bytes),
            less_text(plan.peak_bytes, plan.eager_peak_bytes),
        ),
        ("measured peak", "", measured, ""),
        *_on_device(plan),
        ("  of which the caller's own", bytes_text(plan.resident_bytes), bytes_text(plan.resident_bytes), ""),
        ("no order needs less than", "", bytes_text(plan.lower_bound_bytes), _gap(plan)),
    ]
    if plan.pinned_bytes or plan.host_bytes is not None:
        rows.append(("pinned on the host", "", bytes_text(plan.pinned_bytes), _pinned(plan)))
    if plan.cost_report is not None:
        rows.append(("promised time", "", time_text(plan.cost_report.time_us), _slower(plan.cost_report)))
        if plan.cost_report.time_bound_us:
            rows.append(("no run takes less than", "", time_text(plan.cost_report.time_bound_us), _time_gap(plan.cost_report)))
    table = [f"{label:<28}{eager:>12}{own:>14}  {note}".rstrip() for label, eager, own, note in rows]
    table.append(f"{_changes(plan)}; found by {plan.solver}")
    if plan.peak is not None:
        table += snapshot_lines(plan.peak, again=plan.cost_report is not None and bool(plan.cost_report.evictions))
    table += split_lines(plan)
    table += generated_lines(plan.generated)
    table += list(map(_rule_line, plan.algebra))
    if plan.cost_report is not None:
        table += eviction_lines(plan.cost_report, plan.provenance.device)
        table += _host_lines(plan.cost_report)
        if plan.cost_report.stopped:
            table.append(f"the search was ended early ({plan.cost_report.stopped}): with more time it may find better")
    return "\n".join(table)


def one_line(plan: Contents) -> str:
    """The promise in a few words: peaks, with what is resident, and under a limit what it costs."""
    proof = "proven least" if plan.peak_bytes == plan.lower_bound_bytes else _gap(plan)
    added = "" if plan.cost_report is None else plan.cost_report.added(plan.cost_report.time_us)
    slower = f", time {added}" if added else ""
    peaks = f"peak {bytes_text(plan.peak_bytes)} of {bytes_text(plan.eager_peak_bytes)} in eager"
    return f"{peaks}{slower}, {proof}, {len(plan.order)} operators"


def snapshot_lines(snapshot: Snapshot, most: int = _TENSORS, again: bool = False) -> list[str]:
    """What stands at a step: the operator, then the largest tensors, those of repeated blocks together."""
    lines = [snapshot_line(snapshot, again)]
    groups = alike(snapshot.tensors, lambda tensor: tensor, lambda tensor, _: (tensor.kind, tensor.dtype, tensor.shape))
    lines += [f"{bytes_text(each.nbytes):>14}  {each.spec} {each.tensors[0].kind.value}: {each.origin}" for each in groups[:most]]
    if snapshot.workspace_bytes:
        lines.append(f"{bytes_text(snapshot.workspace_bytes):>14}  workspace of {op_text(snapshot.op)}")
    rest = [tensor for group in groups[most:] for tensor in group.members]
    return [*lines, _rest_line(len(rest), sum(tensor.nbytes for tensor in rest))] if rest else lines


def snapshot_line(snapshot: Snapshot, again: bool = False) -> str:
    """The step and its operator. `again`: those of the forward pass may run later, too, so that being one does not tell when."""
    where, phase = source_text(snapshot.source), "" if again and snapshot.phase == "forward" else f", {snapshot.phase}"
    return f"peak at step {snapshot.step} of {snapshot.steps}{phase}: {op_text(snapshot.op)}{f' of {where}' if where else ''}"


def eviction_lines(report: CostReport, device: str = "", most: int = _EVICTIONS) -> list[str]:
    """What was evicted, what that bought and cost, those of repeated blocks together."""
    groups = alike(report.evictions, lambda eviction: eviction.tensor, lambda _, eviction: eviction.how)
    groups.sort(key=lambda group: (-_spared_bytes(group.members), -group.nbytes))
    lines = [_evictions_total(report)] if report.evictions else []
    lines += [_eviction_line(group) for group in groups[:most]]
    rest = [eviction for group in groups[most:] for eviction in group.members]
    if rest:
        lines.append(f"{_rest_line(len(rest), sum(eviction.tensor.nbytes for eviction in rest))}: {_costs(rest)}")
    if device.startswith("cpu") and not any(eviction.load_us for eviction in report.evictions):
        lines.append(f"nothing is stored elsewhere: {device} has no host to swap to")
    return lines


def _rule_line(report: RuleReport) -> str:
    times = f"{len(report.storages)} time{'s' if len(report.storages) > 1 else ''}"
    peak = f", {bytes_text(report.peak_bytes)} of it at the step that would be the peak" if report.peak_bytes else ""
    time = f"{time_text(abs(report.cost_us))} {'more' if report.cost_us > 0 else 'less'}"
    effect = f"{bytes_text(report.held_bytes):>14}  less held by" if report.held_bytes else f"{'':14}  by"
    return f"{effect} {report.rule}, {times}{peak}: {time}"


def _rest_line(count: int, nbytes: int) -> str:
    return f"{bytes_text(nbytes):>14}  in {count} more"


def _evictions_total(report: CostReport) -> str:
    nbytes, rest_us = sum(eviction.tensor.nbytes for eviction in report.evictions), report.time_us - report.order_us
    rest_us -= sum(eviction.run_us for eviction in report.evictions)
    spared = f"{bytes_text(_spared_bytes(report.evictions))} of it at the step that would be the peak"
    rest = f"; {time_text(rest_us)} more in waits for copies and in rewritten operators" if rest_us > _LEAST_SHARE * report.order_us else ""
    return f"evicted and restored: {bytes_text(nbytes)} in {len(report.evictions)} tensors, {spared}: {_costs(report.evictions)}{rest}"


def _eviction_line(group: AlikeItems[Eviction]) -> str:
    return f"{bytes_text(group.nbytes):>14}  {group.spec}: {group.origin}; {_absence(group)}: {_costs(group.members)}"


def _absence(group: AlikeItems[Eviction]) -> str:
    """When it is away, and where that is not while the peak would be, how much is."""
    steps = [step for eviction in group.members for span in eviction.away for step in span]
    spared_bytes = _spared_bytes(group.members)
    but = f" ({bytes_text(spared_bytes) if spared_bytes else 'none'} of it at the peak)" if spared_bytes < group.nbytes else ""
    return f"away in steps {min(steps, default=0)} to {max(steps, default=0)}{but}"


def _spared_bytes(evictions: Sequence[Eviction]) -> int:
    return sum(eviction.tensor.nbytes for eviction in evictions if eviction.at_peak)


def _costs(evictions: Sequence[Eviction]) -> str:
    runs = sum(eviction.runs for eviction in evictions)
    stored = sum(1 for eviction in evictions if eviction.load_us)
    store_us, load_us = sum(each.store_us for each in evictions), sum(each.load_us for each in evictions)
    parts = [f"{runs} run again, {time_text(sum(eviction.run_us for eviction in evictions))}"] if runs or not stored else []
    return ", ".join([*parts, *([f"{stored} stored, {time_text(store_us)} to the host and {time_text(load_us)} back"] if stored else [])])


def _on_device(plan: Contents) -> list[tuple[str, str, str, str]]:
    if plan.allocated_bytes is None or plan.reserved_bytes is None:
        return []
    return [("PyTorch's allocator counts", "", bytes_text(plan.allocated_bytes), f"and reserves {bytes_text(plan.reserved_bytes)}")]


def _pinned(plan: Contents) -> str:
    """When something is there, what a run has had, and what the limit was."""
    steps = [step for step, index in enumerate(plan.order) for value in plan.graph.nodes[index].results if value.storage.kind is Kind.HOST]
    between = any(value.storage.kind is Kind.HOST for value in plan.graph.inputs)
    when = "between steps, too" if between else f"from step {steps[0]} on" if steps else ""
    measured = "" if plan.measured_pinned_bytes is None else f"measured {bytes_text(plan.measured_pinned_bytes)}"
    limit = "" if plan.host_bytes is None else f"of {bytes_text(plan.host_bytes)} that may be"
    return ", ".join(filter(None, (limit, when, measured)))


def _host_lines(report: CostReport) -> list[str]:
    """What the host's memory buys: nothing of it, all that is of use, and the one in the middle."""
    points = report.host_frontier
    places = sorted({round(piece * (len(points) - 1) / (_HOST_POINTS - 1)) for piece in range(_HOST_POINTS)}) if points else []
    if not points or not report.order_us:
        return []
    rows = ", ".join(f"{bytes_text(points[at].pinned_bytes)} {report.added(points[at].time_us)}" for at in places)
    return [f"time within this memory by what is pinned on the host: {rows}"]


def _gap(plan: Contents) -> str:
    if plan.peak_bytes == plan.lower_bound_bytes:
        return "proven least"
    gap_bytes = plan.peak_bytes - plan.lower_bound_bytes
    return f"gap {bytes_text(gap_bytes)}, {gap_bytes / plan.peak_bytes:.1%}"


def _slower(report: CostReport) -> str:
    if not report.evictions:
        return "nothing computed again"
    return f"{report.added(report.time_us)}; by order alone the peak is {bytes_text(report.order_peak_bytes)}"


def _time_gap(report: CostReport) -> str:
    """How near the time is to what is proven within this peak."""
    gap_us = report.time_us - report.time_bound_us
    return f"gap {gap_us / report.time_us:.1%}" if gap_us > _LEAST_GAP * report.time_us else "proven least"


def _changes(plan: Contents) -> str:
    moved = sum(1 for before, after in zip(plan.order, plan.order[1:], strict=False) if after < before)
    in_place = sum(1 for slot in plan.reuses if slot >= 0)
    again = f", {plan.cost_report.recomputed} computed again" if plan.cost_report is not None and plan.cost_report.recomputed else ""
    stored = sum(1 for eviction in plan.cost_report.evictions if eviction.load_us) if plan.cost_report is not None else 0
    swapped = f", {stored} swapped" if stored else ""
    return f"{len(plan.order)} operators, {moved} brought forward, {in_place} in the memory of an input{again}{swapped}"
