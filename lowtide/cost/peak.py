"""The peak explained: which storages live at a step, who made them, and where in the user's program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.cost.memory import Footprint, counted_storages, order_problem, resident_storages, simulate, storage_bytes
from lowtide.ir.graph import Graph, Kind, Source, Storage
from lowtide.ir.problem import Bytes


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A storage and the steps `[start, end)` over which it lives; where its memory is taken over, it ends where the taker starts."""

    name: str
    nbytes: int  # as the allocator rounds it
    kind: Kind
    op: str  # of the node that makes it, "" where it is an input
    source: Source | None  # of that node
    start: int
    end: int


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


def memory_profile(
    graph: Graph, order: Sequence[int], workspace_bytes: Sequence[int] | None = None, *, round_to: int = 1, eager: bool = False
) -> MemoryProfile:
    """Memory over the steps of `order`, with every storage's lifetime; arguments and errors as for `order_problem` and `simulate`."""
    problem = order_problem(graph, workspace_bytes, round_to=round_to, eager=eager)
    footprint = simulate(problem, order)
    return MemoryProfile(
        footprint_bytes=footprint.footprint_bytes,
        workspace_bytes=tuple(problem.workspace_bytes[list(order)].tolist()),
        resident_bytes=problem.resident_bytes,
        peak_bytes=footprint.peak_bytes,
        peak_step=footprint.peak_step,
        tensors=(*_resident(graph, round_to), *_counted(graph, footprint, round_to, problem.producer.tolist())),
    )


def peak_tensors(
    graph: Graph, order: Sequence[int], workspace_bytes: Sequence[int] | None = None, *, round_to: int = 1, eager: bool = False
) -> tuple[LiveTensor, ...]:
    """What lives at the first step at the peak, the largest first; arguments and errors as for `memory_profile`."""
    profile = memory_profile(graph, order, workspace_bytes, round_to=round_to, eager=eager)
    return profile.at(profile.peak_step)


def _resident(graph: Graph, round_to: int) -> list[LiveTensor]:
    span = (0, len(graph.nodes))
    return [_live(graph, storage, storage_bytes(storage, round_to), -1, span) for storage in resident_storages(graph)]


def _counted(graph: Graph, footprint: Footprint, round_to: int, producer: list[int]) -> list[LiveTensor]:
    spans = zip(footprint.lifetimes.start.tolist(), footprint.lifetimes.end.tolist(), strict=True)
    return [
        _live(graph, storage, storage_bytes(storage, round_to), maker, span)
        for storage, maker, span in zip(counted_storages(graph), producer, spans, strict=True)
    ]


def _live(graph: Graph, storage: Storage, nbytes: int, maker: int, span: tuple[int, int]) -> LiveTensor:
    node = graph.nodes[maker] if maker >= 0 else None
    return LiveTensor(storage.name, nbytes, storage.kind, node.op if node else "", node.source if node else None, *span)
