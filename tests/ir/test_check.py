import re
from dataclasses import replace

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import CheckError
from lowtide.ir.check.graph_check import Verdict, check_graph, check_order
from lowtide.ir.graph import Graph, Kind, Node, Source, Storage, Value
from tests.graphs import array, compute, graphs, view, write

P = array(Storage("p", 4, "cpu", Kind.PARAMETER))
Q = array(Storage("q", 4, "cpu", Kind.PARAMETER))
GIVEN_AWAY = array(Storage("given_away", 4, "cpu", Kind.ACTIVATION))
A = compute("a", P)
FIRST = A.results[0]
N = sympy.Symbol("n", integer=True, nonnegative=True)


def refused(verdict: Verdict, where: str = "") -> "pytest.RaisesExc[CheckError]":
    return pytest.raises(CheckError, match=f"^{re.escape(verdict.value)}: .*{re.escape(where)}")


@given(graphs())
def test_random_graphs_are_right_in_program_order(graph: Graph) -> None:
    check_graph(graph)
    check_order(graph, range(len(graph.nodes)))


def result(**fields: object) -> Node:
    """A node that reads p and makes a value on a storage of 4 bytes, changed as told."""
    value = replace(array(Storage("r", 4, "cpu", Kind.ACTIVATION)), **fields)  # type: ignore[arg-type]
    return Node("aten.make.default", (P,), (value,))


WRITE = write(P)
WRITTEN = WRITE.writes[0][1]
WRONG: list[tuple[Verdict, tuple[Node, ...], str]] = [
    (Verdict.NODE_TWICE, (s := Node("aten._assert.default", (P,), ()), s), "node 1 (aten._assert.default)"),
    (Verdict.DUPLICATE_NAME, (A, compute("a")), "node 1 (aten.make.default -> a) makes a"),
    (Verdict.DUPLICATE_NAME, (compute("p"),), "makes p"),
    (
        Verdict.DUPLICATE_NAME,
        (Node("aten.make.default", (), (array(Storage("p", 4, "cpu", Kind.ACTIVATION), "b"),)),),
        "makes b, on another storage named p",
    ),
    (Verdict.MADE_TWICE, (A, replace(A)), "node 1 (aten.make.default -> a) makes a"),
    (Verdict.MADE_TWICE, (Node("aten.make.default", (), (FIRST, FIRST)),), "makes a"),
    (Verdict.READ_BEFORE_MADE, (compute("b", FIRST), A), "node 0 (aten.make.default -> b) reads a"),
    (Verdict.READ_BEFORE_MADE, (compute("b", FIRST),), "reads a"),
    (Verdict.READ_BEFORE_MADE, (replace(WRITE, args=(), writes=((replace(P), WRITTEN),)),), "reads p"),
    (Verdict.VIEW_APART, (replace(A, op="aten.view.default"),), "node 0 (aten.view.default -> a) makes a on a"),
    (Verdict.UNKNOWN_DTYPE, (result(dtype="float12"),), "makes r of dtype 'float12'; known are bool, uint8"),
    (Verdict.MALFORMED, (result(stride=()),), "makes r: shape (4,), strides ()"),
    (Verdict.MALFORMED, (result(shape=(-1,)),), "shape (-1,)"),
    (Verdict.MALFORMED, (result(stride=(-1,)),), "strides (-1,)"),
    (Verdict.MALFORMED, (result(offset=-1),), "offset -1"),
    (Verdict.MALFORMED, (result(offset=-N - 1),), "offset -n - 1"),
    (Verdict.MALFORMED, (result(storage=Storage("r", -4, "cpu", Kind.ACTIVATION)),), "in -4 bytes"),
    (Verdict.OUTSIDE_STORAGE, (result(shape=(5,)),), "makes r, 5 bytes long, within 4 bytes"),
    (Verdict.OUTSIDE_STORAGE, (result(offset=1),), "5 bytes long"),
    (Verdict.OUTSIDE_STORAGE, (result(dtype="float32", shape=(2,)),), "8 bytes long"),
    (Verdict.OUTSIDE_STORAGE, (result(shape=(2, 2), stride=(1, 3)),), "5 bytes long"),
    (Verdict.OUTSIDE_STORAGE, (result(shape=(N + 5,)),), "n + 5 bytes long"),
    (Verdict.MADE_AT_VERSION, (result(version=1),), "makes r, version 1"),
    (Verdict.REMADE, (A, Node("aten.make.default", (P,), (replace(FIRST, name="b"),))), "node 1 (aten.make.default -> b) makes b on a"),
    (Verdict.REMADE, (Node("aten.make.default", (), (replace(P, name="b"),)),), "makes b on p"),
    (Verdict.OTHER_VERSION, (Node("aten.view.default", (P,), (replace(P, name="b", version=1),)),), "makes b, version 1; now at 0"),
    (Verdict.OTHER_VERSION, (replace(WRITE, outputs=(replace(P, name="b"),)),), "makes b, version 0; now at 1"),
    (Verdict.STALE, (WRITE, compute("b", P)), "node 1 (aten.make.default -> b) reads p, version 0; now at 1"),
    (Verdict.STALE, (WRITE, write(P, name="again")), "now at 1"),
    (Verdict.WRITE_NOT_OWNED, (A, write(FIRST)), "node 1 (aten.copy_.default -> a_v1) writes a"),
    (Verdict.WRITE_NOT_OWNED, (write(GIVEN_AWAY),), "writes given_away"),
    (Verdict.WRITE_STEP, (replace(WRITE, writes=((P, replace(WRITTEN, version=2)),)),), "leaves p, version 0, as p_v1, version 2"),
    (Verdict.WRITE_STEP, (replace(WRITE, writes=((P, replace(WRITTEN, shape=(2,))),)),), "leaves p"),
    (Verdict.WRITE_STEP, (replace(WRITE, writes=((P, replace(Q, name="r", version=1)),)),), "leaves p, version 0, as r"),
    (Verdict.WRITE_STEP, (replace(WRITE, writes=((P, WRITTEN), (P, replace(WRITTEN, name="again")))),), "as again"),
    (
        Verdict.INPLACE_NOT_READ,
        (A, compute("b", P, inplace=((FIRST, "aten.make_.default"),))),
        "node 1 (aten.make.default -> b) may take over a",
    ),
    (Verdict.CONTROL_OUTSIDE, (compute("b", after=(A,)),), "node 0 (aten.make.default -> b) comes after aten.make.default"),
    (Verdict.CONTROL_LATE, (compute("b", after=(A,)), A), "node 0 (aten.make.default -> b) comes after aten.make.default"),
]


@pytest.mark.parametrize(("verdict", "nodes", "where"), WRONG, ids=[verdict.name for verdict, _, _ in WRONG])
def test_a_wrong_graph_is_refused(verdict: Verdict, nodes: tuple[Node, ...], where: str) -> None:
    with refused(verdict, where):
        check_graph(Graph((P, Q, GIVEN_AWAY), nodes, ()))


@pytest.mark.parametrize(("verdict", "nodes", "where"), WRONG, ids=[verdict.name for verdict, _, _ in WRONG])
def test_a_wrong_body_is_refused_where_it_is(verdict: Verdict, nodes: tuple[Node, ...], where: str) -> None:
    inner = Node("aten.inner.default", (), (), body=Graph((P, Q, GIVEN_AWAY), nodes, ()))
    outer = Node("aten.outer.default", (), (), body=Graph((), (inner,), ()))
    with refused(verdict, ", in the body of node 0 (aten.inner.default), in the body of node 0 (aten.outer.default)"):
        check_graph(Graph((), (outer,), ()))


def test_a_stale_view_is_refused() -> None:
    rows = view(P, "rows")
    with refused(Verdict.STALE, "reads rows, version 0; now at 1"):
        check_graph(Graph((P,), (rows, WRITE, compute("b", rows.results[0])), ()))


def test_wrong_inputs_are_refused() -> None:
    with refused(Verdict.INPUT_VERSIONS, "input late is of version 3, not 0"):
        check_graph(Graph((P, replace(P, name="late", version=3)), (), ()))
    with refused(Verdict.MADE_TWICE, "the graph's head makes p"):
        check_graph(Graph((P, P), (), ()))
    with refused(Verdict.OUTSIDE_STORAGE, "the graph's head makes p, 9 bytes long"):
        check_graph(Graph((replace(P, shape=(9,)),), (), ()))


def test_wrong_outputs_are_refused() -> None:
    with refused(Verdict.READ_BEFORE_MADE, "the graph returns a"):
        check_graph(Graph((P,), (), (FIRST,)))


def test_the_source_line_is_named() -> None:
    with refused(Verdict.READ_BEFORE_MADE, "(aten.make.default -> b) at net.py:7 in head reads a"):
        check_graph(Graph((P,), (replace(compute("b", FIRST), source=Source("net.py", 7, "head")),), ()))


def test_what_is_right_at_the_edges_passes() -> None:
    """Inputs that share a storage, are returned, or come in at a later version; a view of what the same node wrote; symbolic sizes."""
    later = replace(P, version=3)
    tied = replace(later, name="tied", shape=(2, 2), stride=(1, 2))
    step = write(later, tied)
    viewed = replace(step, outputs=(replace(step.writes[0][1], name="v"),))
    sized = Value("sized", Storage("sized", 4 * N, "cpu", Kind.ACTIVATION), "float32", (sympy.Max(1, N),), (1,))
    empty = Value("empty", Storage("empty", 0, "cpu", Kind.ACTIVATION), "float32", (0, 5), (5, 1), 7)
    nodes = (viewed, Node("aten.make.default", (), (sized, None, empty)), compute("b", viewed.outputs[0]))  # type: ignore[arg-type]
    check_graph(Graph((later, tied), nodes, (later, tied)))


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ((), "expected each of 2 nodes once, got 0 entries"),
        ((0, 0), "expected each of 2 nodes once, got none of 1"),
        ((0, 2), "expected each of 2 nodes once, got 2, which is none"),
        ((-1, 0), "expected each of 2 nodes once, got -1, which is none"),
        ((0, 1, 1), "expected each of 2 nodes once, got 3 entries"),
    ],
)
def test_an_order_that_is_no_permutation_is_refused(order: tuple[int, ...], expected: str) -> None:
    with refused(Verdict.NOT_A_PERMUTATION, expected):
        check_order(Graph((), (compute("a"), compute("b")), ()), order)


def test_orders_that_break_an_edge_are_refused() -> None:
    read, again = compute("read", P), compute("again", WRITTEN)
    marked = compute("marked", after=(read,))
    graph = Graph((P,), (read, WRITE, again, marked), ())
    check_order(graph, (0, 3, 1, 2))
    with refused(Verdict.ORDER_DATA, "node 2 (aten.make.default -> again), at step 1 reads p_v1"):
        check_order(graph, (0, 2, 1, 3))
    with refused(Verdict.ORDER_HAZARD, "node 0 (aten.make.default -> read), at step 1 reads p, version 0; now at 1"):
        check_order(graph, (1, 0, 2, 3))
    with refused(Verdict.ORDER_CONTROL, "node 3 (aten.make.default -> marked), at step 0 comes after aten.make.default, which has not run"):
        check_order(graph, (3, 0, 1, 2))


@given(graphs(max_nodes=6), st.data())
def test_a_graph_in_a_wrong_program_order_is_refused(graph: Graph, data: st.DataObject) -> None:
    """The check of a graph and that of an order agree on what runs, but for what a view or a new storage is."""
    order = data.draw(st.permutations(range(len(graph.nodes))))
    shuffled = replace(graph, nodes=tuple(graph.nodes[index] for index in order))
    try:
        check_order(graph, order)
    except CheckError:
        with pytest.raises(CheckError):
            check_graph(shuffled)
    else:
        check_graph(shuffled)
