"""Plans under a limit: the fastest within so many bytes, or the leanest within so much time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.cost.memory import order_problem, simulate
from lowtide.cost.peak import peak_tensors
from lowtide.errors import BudgetError
from lowtide.ir.graph import Graph, Value
from lowtide.ir.plan import Plan, Provenance, Trade
from lowtide.ir.summary import bytes_text
from lowtide.rewrite.remat import rematerialise
from lowtide.schedule import Solver
from lowtide.schedule.bound import lower_bound_bytes
from lowtide.search.frontier import Archive, Point, Sweep
from lowtide.search.planning import Candidates, checked, make_plan, planned
from lowtide.search.runs import RunProblem

SWEEP = Sweep()
_NAMED = 5  # tensors that an error names


@dataclass(frozen=True)
class Budget:
    """What a plan may take: bytes of peak, with what is resident, or time as a multiple of that without recomputation."""

    memory_bytes: int | None = None
    latency: float | None = None


def plan_within(
    budget: Budget,
    among: Candidates,
    node_us: Mapping[Graph, Sequence[float]],
    solver: Solver,
    provenance: Provenance,
    *,
    round_to: int = 1,
    held_by_eager: Sequence[Value] = (),
    sweep: Sweep = SWEEP,
) -> Plan:
    """A checked plan within the budget: without recomputation where order alone is enough, else with as little as was found to do.

    `node_us` says what each node of each candidate takes. The other arguments are those of `make_plan`. Raises BudgetError, with the
    smallest peak that was found and what stands there, where nothing fits.
    """
    kept = make_plan(among, solver, provenance, round_to=round_to, held_by_eager=held_by_eager)
    found = _Found.of(among, node_us, solver, kept, round_to, sweep)
    point = found.chosen(budget)
    if point is None:
        assert budget.memory_bytes is not None  # the fastest point of all is within any limit of time
        raise _refusal(found.plan(found.archive.points[0], kept), budget.memory_bytes, round_to)
    return checked(found.plan(point, kept))


@dataclass(frozen=True)
class _Found:
    """The candidates as run problems, and the archive of their schedules."""

    graphs: tuple[Graph, ...]
    workspaces: tuple[Sequence[int], ...]
    problems: tuple[RunProblem, ...]
    archive: Archive
    round_to: int

    @classmethod
    def of(
        cls, among: Candidates, node_us: Mapping[Graph, Sequence[float]], solver: Solver, kept: Plan, round_to: int, sweep: Sweep
    ) -> _Found:
        problems = tuple(RunProblem.of(graph, node_us[graph], sizes, round_to=round_to) for graph, sizes in among.items())
        orders = [
            [problem.runs_of(range(len(graph.nodes))), problem.runs_of(_order(graph, sizes, solver, kept, round_to))]
            for (graph, sizes), problem in zip(among.items(), problems, strict=True)
        ]
        return cls(tuple(among), tuple(among.values()), problems, sweep.explore(problems, orders), round_to)

    def chosen(self, budget: Budget) -> Point | None:
        if budget.memory_bytes is not None:
            return self.archive.within(budget.memory_bytes)
        assert budget.latency is not None
        return self.archive.under(budget.latency * self.kept_us)

    @property
    def kept_us(self) -> float:
        """The time without recomputation, of the fastest graph."""
        return min(point.time_us for point in self.archive.points)

    def plan(self, point: Point, kept: Plan) -> Plan:
        """A point as a plan, not yet checked."""
        done = rematerialise(self.graphs[point.problem], point.runs.tolist())
        sizes = tuple(int(self.workspaces[point.problem][origin]) for origin in done.origins)
        problem = order_problem(done.graph, sizes, round_to=self.round_to)
        order = tuple(range(len(done.graph.nodes)))
        footprint = simulate(problem, order)
        bound_bytes = kept.lower_bound_bytes if not done.recomputed else lower_bound_bytes(problem)
        return dataclasses.replace(
            kept,
            graph=done.graph,
            order=order,
            takeovers=tuple(int(slot) for slot in footprint.takeovers),
            workspace_bytes=sizes,
            peak_bytes=int(footprint.peak_bytes),
            lower_bound_bytes=min(bound_bytes, int(footprint.peak_bytes)),
            status="optimal" if bound_bytes >= footprint.peak_bytes else "feasible",
            trade=Trade(
                runs=tuple(point.runs.tolist()),
                time_us=point.time_us,
                kept_us=self.kept_us,
                kept_peak_bytes=kept.peak_bytes,
                recomputed=len(done.recomputed),
                frontier=tuple((each.peak_bytes, each.time_us) for each in self.archive.points),
            ),
        )


def _order(graph: Graph, sizes: Sequence[int], solver: Solver, kept: Plan, round_to: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The order of least peak of a candidate: known already of the one that the plan chose."""
    order = kept.order if graph is kept.graph else planned(graph, sizes, solver, round_to).order
    return np.array(order, np.int32)


def _refusal(leanest: Plan, memory_bytes: int, round_to: int) -> BudgetError:
    """What to say when nothing fits."""
    graph = leanest.graph
    footprint = simulate(order_problem(graph, leanest.workspace_bytes, round_to=round_to), leanest.order)
    node = graph.nodes[leanest.order[footprint.peak_step]]
    where = f" at {node.source.file}:{node.source.line}" if node.source else ""
    standing = [tensor for tensor in peak_tensors(graph, leanest.order, leanest.workspace_bytes, round_to=round_to) if tensor.nbytes]
    names = ", ".join(f"{tensor.name} ({tensor.kind.value}, {bytes_text(tensor.nbytes)})" for tensor in standing[:_NAMED])
    return BudgetError(
        f"memory: expected at least {leanest.peak_bytes} bytes ({bytes_text(leanest.peak_bytes)}), the smallest peak that was found, "
        f"of which {bytes_text(leanest.resident_bytes)} are the caller's own; got {memory_bytes} bytes ({bytes_text(memory_bytes)}). "
        f"In the way at step {footprint.peak_step} of {len(graph.nodes)} ({node.op}{where}): {names}. "
        "Raise `memory`, make the batch smaller, or set `accumulate`",
        smallest_peak_bytes=leanest.peak_bytes,
    )
