"""The peak explained: which storages live at a step, who made them, and where in the user's program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.cost.memory import Footprint, counted_storages, resident_storages, storage_bytes
from lowtide.ir.graph import Graph
from lowtide.plan.snapshot import LiveTensor, Snapshot, storage_specs
from lowtide.problems.order import Bytes, OrderProblem


@dataclass(frozen=True, eq=False)
class MemoryProfile:
    """Memory over the steps of an order: at each, the bytes of the tensors alive and the running node's workspace are the footprint."""

    footprint_bytes: Bytes  # [n] by step, with what is resident
    workspace_bytes: tuple[int, ...]  # by step
    resident_bytes: int
    peak_bytes: int
    peak_step: int  # the first at the peak, -1 where there are no steps
    tensors: tuple[LiveTensor, ...]  # resident inputs, donated inputs, then what the nodes make, in program order

    def at(self, step: int) -> tuple[LiveTensor, ...]:
        """The tensors that live at a step and have bytes, the largest first, then those of longest standing."""
        alive = [tensor for tensor in self.tensors if tensor.start <= step < tensor.end and tensor.nbytes]
        return tuple(sorted(alive, key=lambda tensor: (-tensor.nbytes, tensor.start)))

    def snapshot(self, graph: Graph, order: Sequence[int]) -> Snapshot | None:
        """The first step at the peak, of the graph and order that this is the profile of; None where there are no steps."""
        if self.peak_step < 0:
            return None
        step = self.peak_step
        return Snapshot.of(graph, step, graph.nodes[order[step]], self.workspace_bytes[step], self.at(step))


def profile_of(graph: Graph, problem: OrderProblem, order: Sequence[int], footprint: Footprint, *, round_to: int = 1) -> MemoryProfile:
    """Memory over the steps of an order, from its problem and what it costs there."""
    return MemoryProfile(
        footprint_bytes=footprint.footprint_bytes,
        workspace_bytes=tuple(problem.workspace_bytes[list(order)].tolist()),
        resident_bytes=problem.resident_bytes,
        peak_bytes=footprint.peak_bytes,
        peak_step=footprint.peak_step,
        tensors=tuple(_live(graph, footprint, round_to)),
    )


def _live(graph: Graph, footprint: Footprint, round_to: int) -> list[LiveTensor]:
    """Every storage that the problem knows of: the caller's own live throughout."""
    known, (start, end) = storage_specs(graph), footprint.lifetimes
    spans = [(storage, 0, len(graph.nodes)) for storage in resident_storages(graph)]
    spans += zip(counted_storages(graph), start.tolist(), end.tolist(), strict=True)
    return [LiveTensor.of(known[storage], storage_bytes(storage, round_to), first, last) for storage, first, last in spans]
