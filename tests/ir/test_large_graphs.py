"""A graph of 100,000 nodes is built, walked, checked, printed and read back, without recursion; what is quadratic does not end in time."""

from lowtide.ir.check.graph_check import check_graph, check_order, check_reuses
from lowtide.ir.edges import predecessors
from lowtide.ir.graph import Graph, Kind, Node, Source, Storage, Value
from lowtide.ir.text.graph_text import parse, to_text
from tests.graphs import array, write

NODES = 100_000
SHAPE, STRIDE, NBYTES = (1, 64, 56, 56), (64 * 56 * 56, 56 * 56, 56, 1), 4 * 64 * 56 * 56


def chain() -> Graph:
    """Convolutions by one weight that is written now and then, with a view after each tenth: as deep as graphs can be."""
    weight = array(Storage("weight", 4096, "cpu", Kind.PARAMETER))
    last = Value("x", Storage("x", NBYTES, "cpu", Kind.INPUT), "float32", SHAPE, STRIDE)
    inputs, nodes = (weight, last), list[Node]()
    for index in range(NODES):
        source = Source("net.py", index, f"layer{index // 100}.conv")
        if index % 10 == 8:
            nodes.append(write(weight, name=f"weight_{index}"))
            weight = nodes[-1].results[0]
        elif index % 10 == 9:
            view = Value(f"view_{index}", last.storage, "float32", (64, 56 * 56), (56 * 56, 1))
            nodes.append(Node("aten.view.default", (last, (64, 56 * 56)), (view,), source=source))
        else:
            made = Value(f"conv_{index}", Storage(f"conv_{index}", NBYTES, "cpu", Kind.ACTIVATION), "float32", SHAPE, STRIDE)
            args = (last, weight, None, (2, 2), (3, 3), (1, 1), False, (0, 0), 1)
            nodes.append(Node("aten.convolution.default", args, (made,), inplace=((last, "aten.relu_.default"),), source=source))
            last = made
    return Graph(inputs, tuple(nodes), (last,))


def test_a_large_graph() -> None:
    graph = chain()
    before = predecessors(graph)
    assert sum(map(len, before)) > NODES
    order = range(NODES)
    check_graph(graph)
    check_order(graph, order)
    check_reuses(graph, order, [-1] * NODES)
    text = to_text(graph)
    again = parse(text)
    assert to_text(again) == text
