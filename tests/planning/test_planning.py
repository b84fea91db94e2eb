"""A plan keeps what it promises: the best candidate, its own peak, checked."""

import dataclasses

import pytest

from lowtide.cost.memory import order_problem, simulate
from lowtide.errors import CheckError
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.plan.plan import Provenance
from lowtide.planning.planner import checked, make_plan, replan
from lowtide.schedule import Best, ProgramOrder

PROVENANCE = Provenance(lowtide="0", torch="0", device="cpu", python="3", threads=1)


def _value(name, nbytes, kind=Kind.ACTIVATION):
    return Value(name, Storage(name, nbytes, "cpu", kind), "uint8", (nbytes,), (1,))


def _two_branches(first_bytes=100, second_bytes=100):
    """Two large tensors, each reduced to a small one: written so that both large ones live at once."""
    x = _value("x", 10, Kind.INPUT)
    a, b, c, d = _value("a", first_bytes), _value("b", second_bytes), _value("c", 1), _value("d", 1)
    nodes = (Node("aten.a.x", (x,), (a,)), Node("aten.b.x", (x,), (b,)), Node("aten.c.x", (a,), (c,)), Node("aten.d.x", (b,), (d,)))
    return Graph((x,), nodes, (c, d))


def test_plan_promises_what_its_order_costs():
    graph = _two_branches()
    plan = make_plan({graph: (0, 7, 0, 0)}, Best(), PROVENANCE)
    assert plan.eager_peak_bytes == 10 + 100 + 100 + 7
    assert plan.peak_bytes == 10 + 100 + 7 == simulate(order_problem(graph, plan.workspace_bytes), plan.order).peak_bytes
    assert plan.resident_bytes == 10


def test_the_leanest_candidate_is_planned_and_eager_is_the_first():
    captured, leaner = _two_branches(), _two_branches(second_bytes=20)
    plan = make_plan({captured: (0,) * 4, leaner: (0,) * 4}, ProgramOrder(), PROVENANCE)
    assert plan.graph is leaner
    assert plan.eager_peak_bytes == 10 + 100 + 100 + 1


def test_of_equal_candidates_the_captured_graph_stays():
    captured, equal = _two_branches(), _two_branches()
    assert make_plan({captured: (0,) * 4, equal: (0,) * 4}, Best(), PROVENANCE).graph is captured


def test_allocator_granules_are_counted():
    plan = make_plan({_two_branches(): (0,) * 4}, Best(), PROVENANCE, round_to=512)
    assert plan.resident_bytes == 512
    assert plan.peak_bytes == 4 * 512, "the batch, one branch's large tensor, both small ones"


def test_a_saved_plan_serves_an_equal_graph_and_a_wrong_one_is_refused():
    plan = make_plan({_two_branches(): (0,) * 4}, Best(), PROVENANCE)
    again = replan(plan, _two_branches())
    assert again.order == plan.order
    with pytest.raises(CheckError):
        checked(dataclasses.replace(plan, order=plan.order[::-1]))
