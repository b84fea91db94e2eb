"""Do a plan's promises follow from its graph, order and reuses? Counted anew, storage by storage, by no code of the cost model.

At each step: the bytes of all storages that live then, and the workspace of the node that runs. What the caller holds is there throughout.
On the host, of each power of two: as many buffers as copies of that size ever live at once, each from its store to the last use; from
beginning to end what lies there between steps.

A loop's workspace is at least what its body makes for itself at its highest. A part's nodes run in program order. A storage lives from
the node that makes it to the last that uses it; a node that may work in the memory of inputs does so in the first that dies there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lowtide.errors import of_kind
from lowtide.ir.bodies import Loop, is_loop
from lowtide.ir.graph import Graph, Kind, Node, Storage
from lowtide.ir.operators.row import DROP, LOAD, STORE
from lowtide.plan.contents import Contents
from lowtide.plan.snapshot import Snapshot


def body_bytes(node: Node, granule_bytes: int) -> int:
    """The least that running a loop takes beside its arguments and results, in its largest part; 0 for any other node."""
    if not is_loop(node):
        return 0
    loop = Loop.of(node)
    return max((peak_bytes(loop.at(size), granule_bytes) for size, _ in loop.sizes), default=0)


def peak_bytes(body: Graph, granule_bytes: int) -> int:
    """What the nodes of a body at some size make for themselves at their highest."""
    last: dict[Storage, int] = {}
    for step, node in enumerate(body.nodes):
        last |= dict.fromkeys((value.storage for value in (*node.inputs, *node.results)), step)
    given = {value.storage for value in body.inputs}
    live: dict[Storage, int] = {}
    peak = 0
    for step, node in enumerate(body.nodes):
        new_storages = [value.storage for value in node.results if value.storage not in given and value.storage not in live]
        taken = next((value.storage for value, _ in node.inplace if _can_take(value.storage, new_storages, live, last, step)), None)
        if taken is not None:
            del live[taken]
        live |= {storage: -(-of_kind(int, storage.nbytes) // granule_bytes) * granule_bytes for storage in new_storages}
        peak = max(peak, sum(live.values()) + body_bytes(node, granule_bytes))
        live = {storage: nbytes for storage, nbytes in live.items() if last[storage] > step}
    return peak


def _can_take(storage: Storage, new_storages: list[Storage], live: dict[Storage, int], last: dict[Storage, int], step: int) -> bool:
    return bool(new_storages) and storage in live and last[storage] == step and storage.nbytes == new_storages[0].nbytes


def untrue_promise(plan: Contents) -> str:
    """What a plan promises and does not keep, in a sentence; "" where all is so. Its graph, order and reuses are right."""
    symbolic = next((storage for storage in _storages(plan.graph) if not isinstance(storage.nbytes, int)), None)
    if symbolic is not None:
        return f"expected a size in bytes, got {symbolic.nbytes} of {symbolic.name}: a plan is of one size"
    return next(_untrue(plan, _Counted.of(plan.graph, plan.order, plan.reuses, plan.granule_bytes)), "")


def lives(plan: Contents) -> dict[Storage, tuple[int, int, int]]:
    """By storage: its bytes as the allocator rounds them, and the steps `[start, end)` over which it lives. Sizes are no symbols."""
    counted = _Counted.of(plan.graph, plan.order, plan.reuses, plan.granule_bytes)
    spans = dict.fromkeys(counted.resident, (0, counted.steps)) | counted.spans
    return {storage: (counted.bytes_of(storage), *span) for storage, span in spans.items()}


def _untrue(plan: Contents, counted: _Counted) -> Iterator[str]:
    footprints = counted.footprints([plan.workspace_bytes[index] for index in plan.order])
    owned = counted.resident_bytes + sum(counted.bytes_of(storage) for storage in _offloaded(plan.graph))
    bound, peak = plan.lower_bound_bytes, max(footprints, default=counted.without_steps_bytes)
    for index, node in enumerate(plan.graph.nodes):
        least = body_bytes(node, plan.granule_bytes)
        if (stated := plan.workspace_bytes[index]) < least:
            yield f"expected 'workspace_bytes' of node {index} to be {least}, which its body makes, or more, got {stated}"
    for name, stated, nbytes in (("resident_bytes", plan.resident_bytes, owned), ("peak_bytes", plan.peak_bytes, peak)):
        if stated != nbytes:
            yield f"expected {name!r} to be {nbytes}, which is what graph, order and reuses come to, got {stated}"
    pinned_bytes = _pinned_bytes(plan.graph, plan.order)
    if plan.pinned_bytes != pinned_bytes:
        yield f"expected 'pinned_bytes' to be {pinned_bytes}, which is what its copies on the host come to, got {plan.pinned_bytes}"
    if plan.host_bytes is not None and pinned_bytes > plan.host_bytes:
        yield f"expected 'host_bytes' to be {pinned_bytes}, which are pinned, or more, got {plan.host_bytes}"
    if not counted.resident_bytes <= bound <= peak:
        yield f"expected 'lower_bound_bytes' from {counted.resident_bytes} to {peak}, got {bound}"
    if owned > plan.eager_peak_bytes:
        yield f"expected 'eager_peak_bytes' to be {owned}, which are resident, or more, got {plan.eager_peak_bytes}"
    if plan.status != ("optimal" if bound == peak else "feasible"):
        yield f"expected 'status' to be optimal where 'lower_bound_bytes' meets 'peak_bytes', else feasible, got {plan.status!r}"
    if plan.eager is not None and (most := max(plan.eager.footprint_bytes, default=plan.eager_peak_bytes)) != plan.eager_peak_bytes:
        yield f"expected 'eager_peak_bytes' to be {most}, the most in 'eager', got {plan.eager_peak_bytes}"
    if plan.peak is not None and footprints:
        yield from _untrue_snapshot(plan.peak, footprints, counted)


def _untrue_snapshot(peak: Snapshot, footprints: Sequence[int], counted: _Counted) -> Iterator[str]:
    step = footprints.index(max(footprints))
    if peak.step != step:
        yield f"peak: expected step {step}, the first at the peak, got {peak.step}"
    live = counted.live(step)
    if {tensor.name: tensor.nbytes for tensor in peak.tensors} != live or len(peak.tensors) != len(live):
        yield "peak: expected the tensors that live then, with their bytes, got others"


@dataclass(frozen=True, slots=True)
class _Counted:
    """Over which steps `[start, end)` each storage lives, beside what is resident."""

    granule_bytes: int  # that the device's allocator rounds sizes up to
    steps: int
    resident: frozenset[Storage]  # throughout
    kept: frozenset[Storage]
    spans: dict[Storage, tuple[int, int]]

    @classmethod
    def of(cls, graph: Graph, order: Sequence[int], reuses: Sequence[int], granule_bytes: int) -> _Counted:
        resident, kept = _owned(graph) - _offloaded(graph), _kept(graph)
        start, end = {value.storage: 0 for value in graph.inputs}, {}
        for step, index in enumerate(order):
            node = graph.nodes[index]
            storages = [value.storage for value in node.outputs if value is not None]
            for storage in storages:
                start.setdefault(storage, step)
            end.update(
                dict.fromkeys((*storages, *(value.storage for value in (*node.inputs, *(before for before, _ in node.writes)))), step + 1)
            )
        for step, index in enumerate(order):
            if reuses[index] >= 0:  # the taker has the memory from its start on
                end[graph.nodes[index].inplace[reuses[index]][0].storage] = step
        end |= dict.fromkeys(kept, len(order))
        counted = (storage for storage in start if storage not in resident and storage.kind is not Kind.HOST)
        spans = {storage: (start[storage], end.get(storage, 0)) for storage in counted}  # [0, 0) where nobody reads what is given away
        return cls(granule_bytes, len(order), resident, kept, spans)

    @property
    def resident_bytes(self) -> int:
        return sum(map(self.bytes_of, self.resident))

    @property
    def without_steps_bytes(self) -> int:
        return self.resident_bytes + sum(self.bytes_of(storage) for storage in self.spans if storage in self.kept)

    def footprints(self, workspace_bytes: Sequence[int]) -> list[int]:
        change = [0] * (self.steps + 1)
        for storage, (start, end) in self.spans.items():
            change[start] += self.bytes_of(storage)
            change[end] -= self.bytes_of(storage)
        live = accumulate(change[:-1], initial=self.resident_bytes)
        next(live)
        return [nbytes + workspace for nbytes, workspace in zip(live, workspace_bytes, strict=True)]

    def live(self, step: int) -> dict[str, int]:
        storages = [*self.resident, *(storage for storage, (start, end) in self.spans.items() if start <= step < end)]
        return {storage.name: self.bytes_of(storage) for storage in storages if self.bytes_of(storage)}

    def bytes_of(self, storage: Storage) -> int:
        return -(-of_kind(int, storage.nbytes) // self.granule_bytes) * self.granule_bytes


def _pinned_bytes(graph: Graph, order: Sequence[int]) -> int:
    spans: dict[Storage, list[int]] = {}
    for step, index in enumerate(order):
        node = graph.nodes[index]
        for value in (*node.results, *node.inputs):
            if value.storage.kind is Kind.HOST:
                spans.setdefault(value.storage, [step, step])[1] = step
    for value in (*graph.inputs, *graph.outputs):
        if value.storage.kind is Kind.HOST:  # memory of its own, which no copy gets before or after
            spans[value.storage] = [0, len(order)]
    total = 0
    for size in {_power_of_two(storage) for storage in spans}:
        alike = [span for storage, span in spans.items() if _power_of_two(storage) == size]
        total += size * max(sum(start <= first <= end for start, end in alike) for first, _ in alike)
    return total


def _power_of_two(storage: Storage) -> int:
    size = 1
    while size < of_kind(int, storage.nbytes):
        size *= 2
    return size


def _owned(graph: Graph) -> frozenset[Storage]:
    return frozenset(value.storage for value in graph.inputs if value.storage.kind.caller_owned or value.storage.kind is Kind.SCALAR)


def _offloaded(graph: Graph) -> frozenset[Storage]:
    """What of it is stored on the host meanwhile, and so not resident throughout."""
    return _owned(graph) & {value.storage for node in graph.nodes if node.op == STORE for value in node.inputs}


def _kept(graph: Graph) -> frozenset[Storage]:
    """What lives to the end: results, and what loads give back to the caller."""
    dropped = {value.storage for node in graph.nodes if node.op == DROP for value in node.inputs}
    loaded = {value.storage for node in graph.nodes if node.op == LOAD for value in node.results if value.storage.kind.caller_owned}
    return frozenset({value.storage for value in graph.outputs} | (loaded - dropped))


def _storages(graph: Graph) -> set[Storage]:
    return {value.storage for value in (*graph.inputs, *(value for node in graph.nodes for value in node.results))}
