import itertools
from dataclasses import replace

import pytest
from hypothesis import given

from lowtide.errors import CheckError
from lowtide.ir.check.graph_check import check_order
from lowtide.ir.edges import predecessors
from lowtide.ir.graph import Graph, Kind, Node, Storage
from tests.graphs import array, compute, graphs, view, write

P = array(Storage("p", 4, "cpu", Kind.PARAMETER))


def passes(graph: Graph, order: tuple[int, ...]) -> bool:
    try:
        check_order(graph, order)
    except CheckError:
        return False
    return True


@given(graphs(max_nodes=5, bodies=False))
def test_topological_orders_are_the_ones_that_the_check_lets_pass(graph: Graph) -> None:
    before = predecessors(graph)
    for order in itertools.permutations(range(len(graph.nodes))):
        step = {node: position for position, node in enumerate(order)}
        topological = all(step[earlier] < step[node] for node in step for earlier in before[node])
        assert topological == passes(graph, order)


@given(graphs())
def test_edges_are_sorted_distinct_and_point_up(graph: Graph) -> None:
    for index, before in enumerate(predecessors(graph)):
        assert list(before) == sorted(set(before))
        assert all(0 <= earlier < index for earlier in before)


def test_a_reader_stands_between_the_writers_around_its_version() -> None:
    first, old, other = write(P), compute("old", P), compute("other")
    new = compute("new", first.writes[0][1])
    second = write(first.writes[0][1])
    graph = Graph((P,), (old, other, first, new, second), ())
    assert predecessors(graph) == ((), (), (0,), (2,), (2, 3))


def test_a_view_is_read_at_its_own_version() -> None:
    rows = view(P, "rows")
    graph = Graph((P,), (rows, compute("a", rows.results[0]), write(P)), ())
    assert predecessors(graph) == ((), (0,), (0, 1))


def test_a_reader_of_a_view_comes_after_the_writer_of_its_version() -> None:
    first = write(P)
    rows = view(first.results[0], "rows")
    graph = Graph((P,), (first, rows, compute("a", rows.results[0])), ())
    assert predecessors(graph) == ((), (0,), (0, 1))


def test_an_output_of_an_old_version_makes_no_edge() -> None:
    rows = view(P, "rows")
    graph = Graph((P,), (rows, write(P)), (rows.results[0],))
    assert predecessors(graph) == ((), (0,))


def test_control_edges_count() -> None:
    first = compute("a")
    assert predecessors(Graph((), (first, compute("b"), compute("c", after=(first,))), ())) == ((), (), (0,))


def test_values_within_nested_tuples_and_keywords_are_read() -> None:
    a, b = compute("a"), compute("b")
    reader = Node("aten.cat.default", ((1, (a.results[0],)),), (), kwargs=(("out", (b.results[0],)),))
    assert predecessors(Graph((), (a, b, reader), ())) == ((), (), (0, 1))


def test_a_value_without_a_producer_is_named() -> None:
    with pytest.raises(CheckError, match=r"node 0 \(aten\.make\.default\) reads p: expected an input"):
        predecessors(Graph((), (compute("a", P),), ()))


def test_a_control_edge_from_outside_is_refused() -> None:
    with pytest.raises(CheckError, match=r"comes after aten\.make\.default: expected a node of this graph"):
        predecessors(Graph((), (compute("a", after=(compute("b"),)),), ()))


def test_a_value_made_twice_is_refused() -> None:
    node = compute("a")
    with pytest.raises(CheckError, match="makes a: expected a new value"):
        predecessors(Graph((), (node, replace(node)), ()))


def test_a_version_made_twice_is_refused() -> None:
    with pytest.raises(CheckError, match="makes version 1 of p: expected the next version, got one that node 0 makes"):
        predecessors(Graph((P,), (write(P), write(P, name="again")), ()))
