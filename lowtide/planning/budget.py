"""Plans under a limit: the fastest within so many bytes, or the leanest within so much time."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowtide.cost.device import Device
from lowtide.cost.memory import order_problem, simulate
from lowtide.cost.peak import peak_moment
from lowtide.ir.graph import Graph, Value
from lowtide.plan.plan import Plan, Provenance, Trade
from lowtide.planning.planner import Candidates, checked, make_plan, planned
from lowtide.planning.refusal import refusal
from lowtide.remat.explain import deals_of
from lowtide.remat.problem import RematProblem
from lowtide.remat.pruning import prompt
from lowtide.remat.sweep.archive import Archive, Point
from lowtide.remat.sweep.search import Sweep
from lowtide.remat.write_out import rematerialise
from lowtide.schedule import Solver
from lowtide.schedule.bound import lower_bound_bytes

SWEEP = Sweep()


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
    links: Device | None = None,
    lend: bool = False,
) -> Plan:
    """A checked plan within the budget: without recomputation where order alone is enough, else with as little as was found to do.

    `node_us` says what each node of each candidate takes; `links` is the device over whose links to a host tensors may be swapped, None for
    no swapping; with `lend`, what the caller can lend is among them. The other arguments are those of `make_plan`. Raises BudgetError,
    with the smallest peak that was found and what stands there, where nothing fits.
    """
    kept = make_plan(among, solver, provenance, round_to=round_to, held_by_eager=held_by_eager)
    found = _Found.of(among, node_us, solver, kept, round_to, sweep, links, lend)
    if found.archive.interrupted:
        warnings.warn(f"search interrupted: the best of {found.archive.states} schedules seen so far is used", stacklevel=2)
    point = found.chosen(budget)
    if point is None:
        assert budget.memory_bytes is not None  # the fastest point of all is within any limit of time
        raise refusal(found.plan(found.archive.points[0], kept), budget.memory_bytes)
    return checked(found.plan(point, kept))


@dataclass(frozen=True)
class _Found:
    """The candidates as remat problems, and the archive of their schedules."""

    graphs: tuple[Graph, ...]
    workspaces: tuple[Sequence[int], ...]
    problems: tuple[RematProblem, ...]
    archive: Archive
    round_to: int

    @classmethod
    def of(
        cls,
        among: Candidates,
        node_us: Mapping[Graph, Sequence[float]],
        solver: Solver,
        kept: Plan,
        round_to: int,
        sweep: Sweep,
        links: Device | None,
        lend: bool,
    ) -> _Found:
        settings: dict[str, Any] = {"round_to": round_to, "swap": links, "swap_state": lend}
        problems = tuple(RematProblem.of(graph, node_us[graph], sizes, **settings) for graph, sizes in among.items())
        orders = [
            [
                prompt(problem, problem.sequence_of(range(len(graph.nodes)))),
                problem.sequence_of(_order(graph, sizes, solver, kept, round_to)),
            ]
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
        done = rematerialise(self.graphs[point.problem], point.sequence.tolist())
        sizes = tuple(map(int, done.of_origins(self.workspaces[point.problem], 0)))
        problem = order_problem(done.graph, sizes, round_to=self.round_to)
        order = tuple(range(len(done.graph.nodes)))
        footprint = simulate(problem, order)
        bound_bytes = kept.lower_bound_bytes if not done.recomputed and not done.transfers else lower_bound_bytes(problem)
        return dataclasses.replace(
            kept,
            graph=done.graph,
            order=order,
            takeovers=tuple(int(slot) for slot in footprint.takeovers),
            workspace_bytes=sizes,
            peak_bytes=int(footprint.peak_bytes),
            lower_bound_bytes=min(bound_bytes, int(footprint.peak_bytes)),
            status="optimal" if bound_bytes >= footprint.peak_bytes else "feasible",
            peak=peak_moment(done.graph, order, sizes, round_to=self.round_to),
            trade=Trade(
                runs=tuple(point.sequence.tolist()),
                time_us=point.time_us,
                kept_us=self.kept_us,
                kept_peak_bytes=kept.peak_bytes,
                recomputed=len(done.recomputed),
                frontier=tuple((each.peak_bytes, each.time_us) for each in self.archive.points),
                deals=deals_of(self.problems[point.problem], point.sequence, self.graphs[point.problem], done.graph, footprint.takeovers),
            ),
        )


def _order(graph: Graph, sizes: Sequence[int], solver: Solver, kept: Plan, round_to: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The order of least peak of a candidate: known already of the one that the plan chose."""
    order = kept.order if graph is kept.graph else planned(graph, sizes, solver, round_to).order
    return np.array(order, np.int32)
