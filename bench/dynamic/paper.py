"""The paper's method, executed: its order, and what its eviction at run time runs at each shape, as programs of the same kernels.

The order and the ways back are found once, on the program with a symbolic length, by `research.eviction`. What is evicted follows
from a batch's shape alone, so it is decided once for a shape, when that first comes; what was run is written out, lowered and run for
each of its batches. A step so takes what its operators take; the time of deciding, which a compiled run time spends in each step, is not
in it. Costs are by this machine's roofline, workspaces are measured.

The order is the paper's ready list or the program's own, whichever ends sooner within the limit: on these programs the ready list as we
read it takes more memory than the program as written, which the paper does not say of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import lowtide.planning.machine as machine
from bench.dynamic.lengths import LONGEST, SHORTEST
from bench.dynamic.task import Batch, loss
from bench.in_values import in_values
from lowtide.capture.program import TrainingProgram, capture_training
from lowtide.capture.trace import Given
from lowtide.cost.laboratory import Laboratory
from lowtide.cost.timings import device_here
from lowtide.cost.workspaces import measure_workspaces
from lowtide.ir.graph import Graph
from lowtide.ir.shapes.dimension import Dimension, Varying, VaryingExtent
from lowtide.remat.write_out import rematerialise
from lowtide.schedule import ProgramOrder
from research.eviction.compile_time import Compiled, compiled
from research.eviction.run_time import Executed, executed

LENGTHS = Varying((Dimension("length", SHORTEST, LONGEST),), (VaryingExtent(0, 1, "length"), VaryingExtent(1, 1, "length")))


@dataclass(frozen=True)
class InBothOrders:
    """A program in the paper's order, and in its own."""

    orders: tuple[Compiled, Compiled]

    @classmethod
    def of(cls, graph: Graph) -> InBothOrders:
        """Compiled twice."""
        return cls((compiled(graph), compiled(graph, range(len(graph.nodes)))))

    def executed(self, point: dict[str, int], *costs: Any, **settings: Any) -> Executed:
        """What ends sooner, of those that fit if one does."""
        runs = [executed(each, point, *costs, **settings) for each in self.orders]
        return min(runs, key=lambda run: (run.misfit is not None, round(run.time_us), run.held_bytes))

    def operators(self) -> list[str]:
        """As they are written."""
        return [node.op for node in self.orders[0].graph.nodes]


class PaperSteps:
    """Steps by shape."""

    def __init__(self, made: Any, optimizer: torch.optim.Optimizer, limit_bytes: int) -> None:
        self._made, self._optimizer, self._limit_bytes = made, optimizer, limit_bytes
        self.of_shape: dict[tuple[int, ...], Any] = {}
        self.misfits: list[str] = []
        self._programs: list[InBothOrders] = []  # over the length: of the optimizer's first step, and of later ones
        self._point: dict[str, int] = {}

    def step(self, batch: Batch) -> Any:
        """One step; a shape that is new is captured and decided on first."""
        shape = tuple(batch["input_ids"].shape)
        if shape not in self.of_shape:
            self.of_shape[shape] = self._captured(batch)
        return self.of_shape[shape](**batch)

    def _captured(self, batch: Batch) -> Any:
        from lowtide import optimize

        if not self._programs:
            program = TrainingProgram(self._made, loss, self._optimizer)
            captured = capture_training(program, Given((), batch, torch.device("cpu"), LENGTHS))
            self._programs = [InBothOrders.of(each.graph) for each in captured]
        self._point = {"length": batch["input_ids"].shape[1]}
        with instead_of_equal_graphs(self._evicted):
            settings: dict[str, Any] = {"solver": ProgramOrder(), "on_new_shape": "error", "progress": False}
            return optimize(self._made, batch, loss=loss, optimizer=self._optimizer, **in_values(**settings))

    def _evicted(self, graph: Graph) -> tuple[Graph]:
        """The graph that does what was run within the limit, in that order."""
        with Laboratory(gradients=True, tries=True) as laboratory:
            workspace_bytes = measure_workspaces(graph.nodes, laboratory=laboratory).nbytes
        program = next(each for each in self._programs if each.operators() == [node.op for node in graph.nodes])
        done = program.executed(self._point, device_here("cpu").graph_us(graph), workspace_bytes, self._limit_bytes)
        if done.misfit is not None:
            self.misfits.append(str(done.misfit))
        return (rematerialise(graph, done.sequence.tolist()).graph,)


@contextmanager
def instead_of_equal_graphs(make: Any) -> Iterator[None]:
    """Have the next programs planned from other graphs than those that lowtide knows to be equal."""
    before = machine.equal_graphs
    machine.equal_graphs = make
    try:
        yield
    finally:
        machine.equal_graphs = before
