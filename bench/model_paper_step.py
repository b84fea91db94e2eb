"""One training step twice: as PyTorch runs it, and as lowtide plans it. Tensors only, as MODeL counts; nothing takes memory here."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from bench.cuda_caching import Allocator, First, Replay, replay
from bench.models import Entry
from bench.models.workload import plain_sgd
from lowtide.capture.program import TrainingProgram, capture_training
from lowtide.capture.trace import CapturedStep, Given
from lowtide.cost.memory import counted_storages, order_problem, resident_storages, storage_bytes
from lowtide.cuda.segments import CachingAllocator, segment_bytes
from lowtide.ir.graph import Graph, Kind, Storage
from lowtide.placement import Placement, place
from lowtide.plan.plan import Plan, Provenance
from lowtide.planning.candidate import Candidate, equal_graphs
from lowtide.planning.planner import Planner
from lowtide.planning.request import Request
from lowtide.problems.placement import PlaceProblem
from research.buffers import order_buffers, place_problem

GRANULE_BYTES = 512  # what PyTorch's allocator for CUDA rounds sizes up to, and so what both are counted with
_NOWHERE = Provenance(lowtide="", torch="", device="", python="", threads=0)


def captured_step(entry: Entry, batch_size: int) -> CapturedStep:
    """The training step with plain SGD, of a model on the meta device."""
    work = entry.build(batch_size, "meta")
    program = TrainingProgram(work.model, work.loss, plain_sgd(work.model))
    return capture_training(program, Given(work.batch, {}, torch.device("cpu")))[-1]


@dataclass(frozen=True)
class InPyTorch:
    """The step as eager PyTorch runs it: in program order, in place only where the program says so."""

    captured: CapturedStep
    allocator: Callable[[], Allocator] = CachingAllocator  # makes the one to replay requests on, simulated or a GPU's

    @cached_property
    def resident(self) -> tuple[int, ...]:
        """The sizes of parameters, buffers and batch, in bytes, each as it is requested before the first step."""
        return tuple(storage_bytes(storage, GRANULE_BYTES) for storage in resident_storages(self.captured.graph))

    @cached_property
    def buffers(self) -> PlaceProblem:
        """What the step requests, with gradients that are there until after the step (`zero_grad(set_to_none=True)`, the default)."""
        graph = _holding_gradients(self.captured)
        return place_problem(order_problem(graph, round_to=GRANULE_BYTES, eager=True), range(len(graph.nodes)), align_bytes=GRANULE_BYTES)

    def replayed(self) -> Replay:
        """The step repeated, with PyTorch's defaults since version 2.0."""
        return self.replayed_in(self.buffers)

    def replayed_in(self, buffers: PlaceProblem) -> Replay:
        """Another order's requests in the same allocator, beside the same parameters, buffers and batch."""
        return replay(self.resident, buffers, allocator=self.allocator())

    def placed_fragmentation(self) -> float:
        """MODeL's (MR - RS) / MR where lowtide gives addresses to the step in program order."""
        resident, arena = sum(self.resident), place(self.buffers).arena_bytes
        return (arena - self.buffers.lower_bound_bytes) / (resident + arena)

    def replayed_1_11(self) -> Replay:
        """The step repeated as in version 1.11, whose `zero_grad` fills the gradients with zeros and keeps them.

        The first step leaves its gradients; every later one adds what it computes to them, and frees that at once.
        """
        graph = _holding_gradients(self.captured)
        problem = order_problem(graph, round_to=GRANULE_BYTES, eager=True)
        found, gradients = order_buffers(problem, range(len(graph.nodes))), {value.storage for value in self.captured.held_storages.values}
        readers = _last_readers_beside_updates(graph)
        end, staying = found.problem.end.copy(), set()
        for tensor, storage in enumerate(counted_storages(graph)):
            if storage in gradients:
                buffer = int(found.of_tensor[tensor])
                staying.add(buffer)
                end[buffer] = 1 + max(int(problem.producer[tensor]), readers.get(storage, -1))
        later = PlaceProblem.of(found.problem.size_bytes, found.problem.start, end)
        return replay(self.resident, later, first=First(found.problem, frozenset(staying)), allocator=self.allocator())


def _holding_gradients(captured: CapturedStep) -> Graph:
    return dataclasses.replace(captured.graph, outputs=(*captured.graph.outputs, *captured.held_storages.values))


def _last_readers_beside_updates(graph: Graph) -> dict[Storage, int]:
    """By storage: the last node that reads it and does not write a parameter."""
    last: dict[Storage, int] = {}
    for index, node in enumerate(graph.nodes):
        if any(before.storage.kind is Kind.PARAMETER for before, _ in node.writes):
            continue
        for value in node.inputs:
            if value is not None:
                last[value.storage] = index
    return last


@dataclass(frozen=True)
class Planned:
    """The step as lowtide plans it: order first, then addresses."""

    plan: Plan
    buffers: PlaceProblem
    placement: Placement
    seconds: dict[str, float]  # "order_s" and "place_s" by the wall clock, "planning_cpu_s" of both together

    @property
    def whole_bytes(self) -> int:
        """The arena and what is resident."""
        return self.plan.resident_bytes + self.placement.arena_bytes

    @property
    def fragmentation(self) -> float:
        """MODeL's (MR - RS) / MR, for the plan."""
        return (self.whole_bytes - self.plan.peak_bytes) / self.whole_bytes

    def reserved_bytes(self, resident: tuple[int, ...]) -> int:
        """What the device gives where the arena is one segment, and what is resident lies in PyTorch's own."""
        nothing = PlaceProblem.of([], [], [])
        return replay(resident, nothing).reserved_bytes + segment_bytes(self.placement.arena_bytes)


def planned_step(captured: CapturedStep) -> Planned:
    """Order and addresses, and the seconds they took."""
    seconds: dict[str, float] = {}
    cpu = time.process_time()
    with _timed(seconds, "order_s"):
        among = [Candidate(graph, (0,) * len(graph.nodes), held_by_eager=captured.held_storages) for graph in equal_graphs(captured.graph)]
        plan = Planner([among]).plans(Request(_NOWHERE, granule_bytes=GRANULE_BYTES))[-1]
    with _timed(seconds, "place_s"):
        problem = order_problem(plan.graph, plan.workspace_bytes, round_to=GRANULE_BYTES)
        buffers = place_problem(problem, plan.order, align_bytes=GRANULE_BYTES)
        placement = place(buffers)
    return Planned(plan, buffers, placement, seconds | {"planning_cpu_s": time.process_time() - cpu})


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start
