"""BladeDISC++'s own methods: its listing by cases, and its ready list against the plain one where there is but one point."""

from dataclasses import replace

from hypothesis import given, settings

from lowtide.cost.memory import checked_order
from lowtide.cost.symbolic import symbolic_problem
from lowtide.ir.shapes.dimension import Dimension
from research.orders.symbolic import impact, symbolic_ready_list
from research.recompute import preferred, recomputations
from research.shapes.compare import Comparison, compare
from research.shapes.shape_graph import simplified
from tests.listing import listing
from tests.symbolic import symbolic_cases

unhurried = settings(deadline=None, max_examples=80)


def ops(graph, order):
    return [graph.nodes[node].outputs[0].name for node in order]


def test_the_order_of_the_listing():
    """With one dimension every choice is by impact: 12, 10996, -11007, 11007, 12288 and 49152 times @S1."""
    graph = simplified(listing())
    problem = symbolic_problem(graph)
    order = symbolic_ready_list(problem)
    assert ops(graph, order) == ["v2", "v3", "v4", "v1084", "v1085", "v1"]
    impacts = [str(impact(problem, order[:step], node)) for step, node in enumerate(order)]
    assert impacts == ["12*S1", "10996*S1", "-11007*S1", "11007*S1", "12288*S1", "49152*S1"]


def test_the_ready_set_of_the_paper():
    """The product that is the last to read %2 is chosen before the broadcast: 10996 * @S1 against 4096 * @S0, which is 49152 * @S1."""
    graph = listing()
    broadcast, reshape, product = (node.outputs[0].name for node in graph.nodes[:3])
    assert (broadcast, reshape, product) == ("v1", "v2", "v3")
    before, after = (symbolic_problem(each) for each in (graph, simplified(graph)))
    assert [str(impact(before, (1,), node)) for node in (0, 2)] == ["4096*S0", "10996*S1"]
    assert [str(impact(after, (1,), node)) for node in (0, 2)] == ["49152*S1", "10996*S1"]
    assert compare(impact(before, (1,), 2).size, impact(before, (1,), 0).size, before.dimensions) is Comparison.UNKNOWN
    assert compare(impact(after, (1,), 2).size, impact(after, (1,), 0).size, after.dimensions) is Comparison.AT_MOST


def test_the_recomputation_of_the_listing():
    """-11007, -11 and +1 times @S1: only the last one saves memory, and is preferred."""
    graph = simplified(listing())
    result = graph.nodes[3].outputs[0]
    found = list(recomputations(graph, result))
    assert [str(each.impact_bytes) for each in found] == ["-11007*S1", "-11*S1", "S1"]
    assert [ops(graph, map(graph.nodes.index, each.nodes)) for each in found] == [["v4"], ["v4", "v3"], ["v4", "v3", "v2"]]
    assert preferred(graph, result) == found[2]


def test_what_saves_nothing_is_not_preferred():
    graph = simplified(listing())
    drawn = replace(graph.nodes[2], op="aten.rand_like.default")
    without = replace(graph, nodes=(*graph.nodes[:2], drawn, *graph.nodes[3:]))
    assert len(list(recomputations(without, graph.nodes[3].outputs[0]))) == 1
    assert preferred(without, graph.nodes[3].outputs[0]) is None


@unhurried
@given(symbolic_cases())
def test_the_order_is_right_and_the_same_again(symbolic):
    problem = symbolic.problem
    order = symbolic_ready_list(problem)
    assert checked_order(problem.structure, order).tolist() == list(order)
    assert symbolic_ready_list(symbolic.problem) == order


@unhurried
@given(symbolic_cases(most=0))
def test_at_one_point_each_node_is_of_least_impact(symbolic):
    """Where all impacts can be compared there is nothing but numbers: the slow way says what is ready and what it adds."""
    case = symbolic.at({each.name: each.least for each in symbolic.dimensions})
    done: list[int] = []
    for node in symbolic_ready_list(symbolic.problem):
        ready = [other for other in range(len(case.tasks)) if other not in done and case.preds(other) <= set(done)]
        assert added(case, done, node) == min(added(case, done, other) for other in ready)
        done.append(node)


def added(case, done, node):
    """Bytes alive after a node, less those before it."""
    before, after = alive(case, set(done)), alive(case, {*done, node})
    return sum(case.tensor_bytes[tensor] for tensor in after) - sum(case.tensor_bytes[tensor] for tensor in before)


def alive(case, done):
    made = {tensor for node in done for tensor in case.tasks[node].makes}
    given_ = set(range(len(case.tensor_bytes))) - {tensor for task in case.tasks for tensor in task.makes}
    return {tensor for tensor in made | given_ if tensor in case.kept or case.readers(tensor) - done}


@unhurried
@given(symbolic_cases(max_nodes=5))
def test_no_node_is_chosen_that_one_other_beats_everywhere_while_all_can_be_compared(symbolic):
    """Over a range: where the impacts of all ready nodes compare, the chosen one is the least."""
    problem, done = symbolic.problem, []
    for node in symbolic_ready_list(problem):
        ready = [other for other in range(len(symbolic.case.tasks)) if other not in done and symbolic.case.preds(other) <= set(done)]
        sizes = {other: impact(problem, done, other).size for other in ready}
        answers = {(one, two): compare(sizes[one], sizes[two], problem.dimensions) for one in ready for two in ready}
        if Comparison.UNKNOWN not in answers.values():
            assert {answers[node, other] for other in ready} <= {Comparison.AT_MOST, Comparison.EQUAL}
        done.append(node)


def test_a_single_range_of_one_number_is_a_number():
    graph = replace(simplified(listing()), dimensions=(Dimension("S1", 7, 7),))
    assert ops(graph, symbolic_ready_list(symbolic_problem(graph))) == ["v2", "v3", "v4", "v1084", "v1085", "v1"]
