"""Plans by order alone, from the graph and order of least peak; and the check that every plan has to pass.

No plan leaves planning before checks that share no code with any solver have found nothing wrong with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lowtide.cost.memory import profile_of, simulate, storage_bytes
from lowtide.errors import CheckError
from lowtide.ir.check.graph_check import check_graph, check_order, check_reuses
from lowtide.ir.operators.nodes import offloaded_storages
from lowtide.plan.plan import Plan
from lowtide.plan.promises import untrue_promise
from lowtide.planning.candidate import Candidate, order_together
from lowtide.planning.request import Request
from lowtide.rewrite.algebra.rewritings import told


def checked(plan: Plan) -> Plan:
    """The plan, if its graph, order and reuses keep every rule and its promises follow from them. Raises CheckError."""
    check_graph(plan.graph)
    check_order(plan.graph, plan.order)
    check_reuses(plan.graph, plan.order, plan.reuses)
    if complaint := untrue_promise(plan):
        raise CheckError(f"plan: {complaint}")
    return plan


def ordered(candidates: Sequence[Candidate], request: Request) -> Plan:
    """The captured graph or one that computes the same, in the order of least peak that the solver finds for any.

    What runs generated kernels goes first. Of those that need no more the one that algebra has made quickest, and of equal ones the first.
    Not yet checked. `eager_peak_bytes` is the peak of the captured program, the first candidate, as it stands.
    """
    order_together(candidates, request.solver, request.granule_bytes)
    best = min(
        candidates, key=lambda each: (not each.generated, each.ordered(request.solver, request.granule_bytes).peak_bytes, each.algebra_us)
    )
    return in_its_order(candidates[0], best, request)


def in_its_order(captured: Candidate, best: Candidate, request: Request) -> Plan:
    """One candidate in the order that is known of it, or that the solver finds. Not yet checked."""
    granule_bytes = request.granule_bytes
    problem, schedule = best.order_problem(granule_bytes), best.ordered(request.solver, granule_bytes)
    footprint = simulate(problem, schedule.order)
    order = tuple(int(index) for index in schedule.order)
    plan = Plan(
        graph=best.graph,
        order=order,
        reuses=tuple(int(slot) for slot in footprint.reuses),
        workspace_bytes=tuple(int(size) for size in best.workspace_bytes),
        resident_bytes=int(problem.resident_bytes) + sum(storage_bytes(each, granule_bytes) for each in offloaded_storages(best.graph)),
        peak_bytes=int(schedule.peak_bytes),
        eager_peak_bytes=captured.eager(granule_bytes).peak_bytes,
        lower_bound_bytes=int(schedule.lower_bound_bytes),
        status=schedule.status.name.lower(),
        solver=schedule.solver,
        provenance=request.provenance,
        peak=profile_of(best.graph, problem, order, footprint, round_to=granule_bytes).snapshot(best.graph, order),
        granule_bytes=granule_bytes,
        program=captured.program(request.provenance.torch, granule_bytes),
        node_us=best.node_us,
        issue_us=best.issue_us,
        eager=captured.eager(granule_bytes).timed(captured.node_us),
    )
    return dataclasses.replace(plan, algebra=told(best.applied_rules, plan))
