"""What algebra may do to a plan: nothing that costs time without a limit, nothing inexact unless asked for; and what a plan tells."""

import dataclasses

import numpy as np
import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.cost.measures import Measures
from lowtide.errors import FormatError
from lowtide.ir.check.graph_check import check_graph
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.ir.shapes.dimension import Dimension
from lowtide.ir.shapes.points import at
from lowtide.ir.text.graph_text import to_text
from lowtide.plan.plan import Plan
from lowtide.planning.candidate import Candidate
from lowtide.planning.request import Budget, Effort, Request
from lowtide.ranges.candidate import Ranged
from lowtide.rewrite.rewritings import RULES, over_dimensions, rewritings, rewritten_as
from tests import planned
from tests.graph_runs import NOWHERE, training_graph

OWN = "lowtide."


class Net(nn.Module):
    """Two dropouts, of which one is eight times as large."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 512), nn.Linear(512, 64)

    def forward(self, x):
        return F.dropout(self.second(F.dropout(self.first(x).tanh(), 0.1)).tanh(), 0.1).square()


@pytest.fixture(scope="module")
def graph():
    return training_graph(Net(), (torch.zeros(64, 16),), lambda model, x: model(x).sum())


def times(own_us, other_us=1.0):
    """Each of lowtide's own operators takes as long, and each other one."""
    return lambda nodes, among: [own_us if node.op.startswith(OWN) else other_us for node in nodes]


def candidates(graph, times_of, exact=True):
    found = [Candidate(graph, (0,) * len(graph.nodes))]
    for each in rewritings(graph, times_of, exact=exact):
        zeros = (0,) * len(each.graph.nodes)
        found.append(Candidate(each.graph, zeros, exact=each.exact, costs_time=each.costs_time, applied_rules=each.applied_rules))
    return [each.timed(times_of(each.graph.nodes, each.graph.nodes)) for each in found]


def test_what_costs_no_time_is_done_without_a_limit(graph):
    plain, plan = (planned.plan(candidates(graph, times(us)), Request(NOWHERE)) for us in (2.0, 0.5))
    assert not plain.algebra
    assert any(node.op.startswith(OWN) for node in plan.graph.nodes)
    (report,) = plan.algebra
    assert (report.rule, len(report.storages)) == ("dropout's masks as bits", 2)
    assert report.held_bytes == 64 * (512 + 64) * 4 * 31 // 32
    assert 0 < report.peak_bytes <= report.held_bytes
    assert report.peak_bytes >= plain.peak_bytes - plan.peak_bytes > 0
    assert report.cost_us == pytest.approx(2 * (3 * 0.5 - 3 * 1.0))


def test_of_graphs_that_need_as_much_the_quicker_is_taken(graph):
    """What is held by masks is none of the peak here: workspaces of the first node are."""
    plain, *others = candidates(graph, times(0.5))
    among = [dataclasses.replace(each, workspace_bytes=(2**24, *each.workspace_bytes[1:])) for each in (plain, *others)]
    plan = planned.plan(among, Request(NOWHERE))
    assert plan.peak_bytes == planned.plan(among[:1], Request(NOWHERE)).peak_bytes
    assert plan.algebra


def test_what_costs_time_is_done_under_a_limit_that_needs_it(graph):
    among = candidates(graph, times(1.01))
    plain = planned.plan(among, Request(NOWHERE))
    budgets = Budget(plain.peak_bytes), Budget(plain.peak_bytes * 19 // 20)
    roomy, tight = (planned.plan(among, Request(NOWHERE, budget, sweeps=Effort.QUICK.sweeps)) for budget in budgets)
    assert not roomy.algebra
    assert roomy.cost_report.order_peak_bytes == tight.cost_report.order_peak_bytes == plain.peak_bytes
    assert tight.algebra
    assert tight.peak_bytes <= plain.peak_bytes * 19 // 20


def test_some_places_pay_for_others(graph):
    """The large one takes less time, the small one more: both where the first gains enough, else it alone."""

    def times_of(small_us):
        def of(nodes, among):
            return [small_us if 64 * 64 in _sizes(node) and node.op.startswith(OWN) else 1.0 for node in nodes]

        return of

    def _sizes(node):
        return [value.shape[0] * value.shape[1] for value in node.outputs if value is not None and len(value.shape) == 2]

    found = list(rewritings(graph, times_of(50.0), exact=True))
    assert [(len(each.applied_rules), each.costs_time) for each in found] == [(2, True), (1, False)]
    assert found[1].applied_rules[0].saved_bytes == 64 * 512 * 4 * 31 // 32


def test_a_saved_plan_knows_its_rules(graph, tmp_path):
    plan = planned.plan(candidates(graph, times(0.5)), Request(NOWHERE))
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.algebra == plan.algebra
    assert str(loaded) == str(plan)
    assert "less held by dropout's masks as bits, 2 times" in str(plan)
    assert to_text(rewritten_as(graph, loaded.algebra).graph) == to_text(plan.graph)


@pytest.mark.parametrize("change", [{"held": []}, {"held": "x"}, {"cost_us": "much"}, {"cost_us": True}, {"peak_bytes": 0.5}, {"more": 1}])
def test_what_is_no_report_is_refused(graph, change, monkeypatch):
    plan = planned.plan(candidates(graph, times(0.5)), Request(NOWHERE))
    kind, rows = type(plan.algebra[0]), plan.algebra[0].rows()
    monkeypatch.setattr(kind, "rows", lambda self: rows | change)
    with pytest.raises(FormatError, match="algebra"):
        Plan.from_json(plan.to_json())


def test_nothing_that_is_not_exact_unless_it_is_asked_for(graph):
    """Of all rules."""
    among = candidates(graph, times(0.5))
    assert all(each.exact for each in among)
    assert {applied_rule.rule for each in among for applied_rule in each.applied_rules} <= {rule.name for rule in RULES if rule.exact}
    doubtful = [among[0], *(dataclasses.replace(each, exact=False) for each in among[1:])]
    assert not planned.plan(doubtful, Request(NOWHERE)).algebra
    assert planned.plan(doubtful, Request(NOWHERE, exact=False)).algebra


def over_rows():
    """Dropout of a number of rows that varies, forward and backward, as a graph over that number."""
    rows = sympy.symbols("rows", integer=True, nonnegative=True)

    def matrix(name, kind=Kind.ACTIVATION):
        return Value(name, Storage(name, 4 * 24 * rows, "cpu", kind), "float32", (rows, 24), (24, 1))

    x, drawn, mask, y, g = matrix("x", Kind.INPUT), matrix("drawn"), matrix("mask"), matrix("y"), matrix("g", Kind.GRADIENT)
    nodes = (
        Node("aten.bernoulli.p", (x, 0.75), (drawn,)),
        Node("aten.div.Tensor", (drawn, 0.75), (mask,)),
        Node("aten.mul.Tensor", (x, mask), (y,)),
        Node("aten.mul.Tensor", (y, mask), (g,)),
    )
    return Graph((x,), nodes, (g,), (Dimension("rows", 2, 64),))


def test_a_graph_over_dimensions_is_rewritten_as_at_one_point():
    graph, points = over_rows(), [{"rows": 2}, {"rows": 37}, {"rows": 64}]
    (found,) = rewritings(at(graph, points[-1]), times(0.5), exact=True)
    whole = over_dimensions(graph, found)
    assert whole is not None
    zeros = np.zeros((len(points), len(whole.graph.nodes)), np.int64)
    ranged = Ranged.by_algebra(whole, Measures.of(whole.graph, points, zeros), 0.0)
    for point in points:
        candidate = ranged.at(point)
        check_graph(candidate.graph)
        assert to_text(candidate.graph) == to_text(next(rewritings(at(graph, point), times(0.5), exact=True)).graph)
        assert [applied_rule.saved_bytes for applied_rule in candidate.applied_rules] == [4 * 24 * point["rows"] - 3 * point["rows"]]
