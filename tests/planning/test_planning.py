"""A plan keeps what it promises: the best candidate, its own peak, checked."""

import dataclasses

import pytest

from lowtide.cost.memory import order_problem, simulate
from lowtide.errors import CheckError
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.plan.plan import Provenance
from lowtide.planning.candidate import Candidate
from lowtide.planning.planner import checked
from lowtide.planning.replan import replan
from lowtide.planning.request import NO_LIMIT, Budget, Effort, Request
from lowtide.schedule import Best, ProgramOrder
from tests.planned import plan

BEST = Best()
PROVENANCE = Provenance(lowtide="0", torch="0", device="cpu", python="3", threads=1)


def _value(name, nbytes, kind=Kind.ACTIVATION):
    return Value(name, Storage(name, nbytes, "cpu", kind), "uint8", (nbytes,), (1,))


def _two_branches(first_bytes=100, second_bytes=100):
    """Two large tensors, each reduced to a small one: written so that both large ones live at once."""
    x = _value("x", 10, Kind.INPUT)
    a, b, c, d = _value("a", first_bytes), _value("b", second_bytes), _value("c", 1), _value("d", 1)
    nodes = (Node("aten.a.x", (x,), (a,)), Node("aten.b.x", (x,), (b,)), Node("aten.c.x", (a,), (c,)), Node("aten.d.x", (b,), (d,)))
    return Graph((x,), nodes, (c, d))


def _planned(*candidates, solver=BEST, granule_bytes=1):
    among = [Candidate(graph, sizes) for graph, sizes in candidates]
    return plan(among, Request(PROVENANCE, solver=solver, granule_bytes=granule_bytes))


def test_plan_promises_what_its_order_costs():
    graph = _two_branches()
    found = _planned((graph, (0, 7, 0, 0)))
    assert found.eager_peak_bytes == 10 + 100 + 100 + 7
    assert found.peak_bytes == 10 + 100 + 7 == simulate(order_problem(graph, found.workspace_bytes), found.order).peak_bytes
    assert found.resident_bytes == 10


def test_the_leanest_candidate_is_planned_and_eager_is_the_first():
    captured, leaner = _two_branches(), _two_branches(second_bytes=20)
    found = _planned((captured, (0,) * 4), (leaner, (0,) * 4), solver=ProgramOrder())
    assert found.graph is leaner
    assert found.eager_peak_bytes == 10 + 100 + 100 + 1


def test_a_limit_never_gives_a_higher_peak_than_none():
    """Also where the leaner graph, taken for free without a limit, was measured to be slower: there is room for the other one."""
    graphs = _two_branches(), _two_branches(second_bytes=20)
    among = [Candidate(graph, (0,) * 4).timed((us,) * 4) for graph, us in zip(graphs, (1.0, 1.1), strict=True)]
    requests = [Request(PROVENANCE, budget, sweeps=Effort.QUICK.sweeps) for budget in (NO_LIMIT, *map(Budget, (1000, 130, 120)))]
    without, *limited = (plan(among, request) for request in requests)
    assert all(each.peak_bytes <= without.peak_bytes for each in limited)
    assert limited[0].peak_bytes == without.peak_bytes


def test_of_graphs_with_compiled_kernels_a_limit_takes_the_fastest():
    """Without a limit their times decide which one there is: the leanest is no measure for a limit."""
    graphs = _two_branches(), _two_branches(second_bytes=20)
    among = [Candidate(graph, (0,) * 4, generated=True).timed((us,) * 4) for graph, us in zip(graphs, (1.0, 1.1), strict=True)]
    report = plan(among, Request(PROVENANCE, Budget(1000), sweeps=Effort.QUICK.sweeps)).cost_report
    assert report is not None
    assert report.time_us == 4.0
    assert report.frontier[-1].time_us == 4.0


def test_of_equal_candidates_the_captured_graph_stays():
    captured, equal = _two_branches(), _two_branches()
    assert _planned((captured, (0,) * 4), (equal, (0,) * 4)).graph is captured


def test_allocator_granules_are_counted():
    found = _planned((_two_branches(), (0,) * 4), granule_bytes=512)
    assert found.resident_bytes == 512
    assert found.peak_bytes == 4 * 512, "the batch, one branch's large tensor, both small ones"


def test_a_saved_plan_serves_an_equal_graph_and_a_wrong_one_is_refused():
    found = _planned((_two_branches(), (0,) * 4))
    again = replan(found, _two_branches())
    assert again.order == found.order
    with pytest.raises(CheckError):
        checked(dataclasses.replace(found, order=found.order[::-1]))
