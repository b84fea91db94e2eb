"""From a graph to a plan: choose graph and order, derive what follows from them, promise the peak, have it checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from lowtide.cost.memory import offloaded_storages, order_problem, simulate, storage_bytes
from lowtide.cost.peak import peak_moment
from lowtide.errors import CheckError
from lowtide.ir.check.graph_check import check_graph, check_order, check_takeovers
from lowtide.ir.graph import Graph, Value
from lowtide.plan.plan import Plan, Provenance, program_hash
from lowtide.plan.promises import untrue_promise
from lowtide.rewrite.results import read_results
from lowtide.rewrite.split import split_results
from lowtide.schedule import ProgramOrder, Schedule, Solver, schedule

# Equal graphs, the captured one first, and what each of their nodes needs beside its inputs and results, bytes; 0 where unknown.
Candidates: TypeAlias = Mapping[Graph, Sequence[int]]

_REWRITES = (read_results, split_results)


def make_plan(among: Candidates, solver: Solver, provenance: Provenance, *, round_to: int = 1, held_by_eager: Sequence[Value] = ()) -> Plan:
    """A checked plan: the captured graph or one that computes the same, in the order of least peak that `solver` finds for any.

    `round_to` is what the device's allocator rounds sizes up to. `eager_peak_bytes` is the peak of the captured program as it
    stands, working in place only where it did itself, and holding to the end what `held_by_eager` says: eager PyTorch keeps
    gradients until after the step.
    """
    captured = next(iter(among))
    eager_bytes = eager_peak_bytes(captured, among[captured], round_to=round_to, held_by_eager=held_by_eager)
    found = [_planned(graph, sizes, solver, provenance, eager_bytes, round_to) for graph, sizes in among.items()]
    best = min(found, key=lambda plan: plan.peak_bytes)
    peak = peak_moment(best.graph, best.order, best.workspace_bytes, round_to=round_to)
    return checked(dataclasses.replace(best, peak=peak, program=bound_to(captured, provenance, round_to)))


def bound_to(captured: Graph, provenance: Provenance, round_to: int) -> str:
    """What a plan for a captured program is bound to: the program, torch's version, and what sizes are rounded up to.

    Not the machine whose times it was made for: a plan for one that was simulated runs on the one that is there.
    """
    return program_hash(captured, provenance.torch, round_to)


def eager_peak_bytes(graph: Graph, workspace_bytes: Sequence[int], *, round_to: int = 1, held_by_eager: Sequence[Value] = ()) -> int:
    """The peak of a captured program as it stands: see `make_plan`."""
    as_eager = dataclasses.replace(graph, outputs=(*graph.outputs, *held_by_eager))
    return schedule(order_problem(as_eager, workspace_bytes, round_to=round_to, eager=True), ProgramOrder()).peak_bytes


def candidates(graph: Graph) -> tuple[Graph, ...]:
    """The graphs that compute what `graph` does, bit for bit, and may need less memory; `graph` itself first."""
    found = [graph]
    for rewrite in _REWRITES:
        found += [done.graph for old in found if (done := rewrite(old)).forward]
    return tuple(found)


def replan(saved: Plan, graph: Graph) -> Plan:
    """A plan that was made for an equal graph, for this one: nothing is solved again."""
    return checked(dataclasses.replace(saved, graph=graph))


def checked(plan: Plan) -> Plan:
    """The plan, once checks that share no code with any solver found nothing wrong with it. Raises CheckError."""
    check_graph(plan.graph)
    check_order(plan.graph, plan.order)
    check_takeovers(plan.graph, plan.order, plan.takeovers)
    if complaint := untrue_promise(plan):
        raise CheckError(f"plan: {complaint}")
    return plan


def planned(graph: Graph, workspace_bytes: Sequence[int], solver: Solver, round_to: int) -> Schedule:
    """The order that `solver` finds for a graph."""
    return schedule(order_problem(graph, workspace_bytes, round_to=round_to), solver)


def _planned(graph: Graph, workspace_bytes: Sequence[int], solver: Solver, provenance: Provenance, eager_bytes: int, round_to: int) -> Plan:
    problem = order_problem(graph, workspace_bytes, round_to=round_to)
    found = schedule(problem, solver)
    return Plan(
        graph=graph,
        order=tuple(int(index) for index in found.order),
        takeovers=tuple(int(slot) for slot in simulate(problem, found.order).takeovers),
        workspace_bytes=tuple(int(size) for size in workspace_bytes),
        resident_bytes=int(problem.resident_bytes) + sum(storage_bytes(storage, round_to) for storage in offloaded_storages(graph)),
        peak_bytes=int(found.peak_bytes),
        eager_peak_bytes=int(eager_bytes),
        lower_bound_bytes=int(found.lower_bound_bytes),
        status=found.status.name.lower(),
        solver=found.solver,
        provenance=provenance,
        granule_bytes=round_to,
    )
