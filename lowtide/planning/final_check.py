"""No plan leaves planning before checks that share no code with any solver have found nothing wrong with it."""

from __future__ import annotations

from lowtide.errors import CheckError
from lowtide.ir.check.graph_check import check_graph, check_order, check_reuses
from lowtide.plan.plan import Plan
from lowtide.plan.promises import untrue_promise


def checked(plan: Plan) -> Plan:
    """The plan, if its graph, order and reuses keep every rule and its promises follow from them. Raises CheckError."""
    check_graph(plan.graph)
    check_order(plan.graph, plan.order)
    check_reuses(plan.graph, plan.order, plan.reuses)
    if complaint := untrue_promise(plan):
        raise CheckError(f"plan: {complaint}")
    return plan
