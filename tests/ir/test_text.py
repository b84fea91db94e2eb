import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import sympy
from hypothesis import given

from lowtide.errors import FormatError
from lowtide.ir.check.graph_check import check_graph
from lowtide.ir.edges import predecessors
from lowtide.ir.graph import Arg, Atom, Graph, Kind, Node, Source, Storage, Value
from lowtide.ir.text import graph_text as text_module
from lowtide.ir.text.graph_text import parse, to_text
from tests.graphs import array, compute, graphs, view, write

S0 = sympy.Symbol("s0", integer=True, nonnegative=True)
INF, NAN = float("inf"), float("nan")


def training_step() -> Graph:
    """A linear layer by hand, its gradient and its update, with everything that text has a clause for."""
    w = Value("weight", Storage("weight", 24, "cpu", Kind.PARAMETER), "float32", (3, 2), (2, 1))
    tied = Value("tied", w.storage, "float32", (2, 3), (1, 2))
    x = Value("x", Storage("x", 4 * 1024 * 2, "cpu", Kind.INPUT), "float32", (1024, 2), (2, 1))
    lr = Value("lr", Storage("lr", 0, "cpu", Kind.SCALAR), "scalar", (), ())
    y = Value("mm", Storage("mm", 4 * 1024 * 3, "cpu", Kind.ACTIVATION), "float32", (1024, 3), (3, 1))
    row = Value("select", y.storage, "float32", (3,), (1,), 3)
    block = Value("relu", Storage("block", 16384, "cpu", Kind.ACTIVATION), "float32", (1024, 3), (3, 1))
    mask = Value("mask", Storage("mask", 3072, "cpu", Kind.ACTIVATION), "bool", (1024, 3), (3, 1))
    grad = Value("grad", Storage("grad", 24, "cpu", Kind.GRADIENT), "float32", (3, 2), (1, 3))
    rate = Value("mul", Storage("mul", 0, "cpu", Kind.SCALAR), "scalar", (), ())
    after = replace(w, name="weight_v1", version=1)
    forward = Node("aten.mm.default", (x, tied), (y,), source=Source("net.py", 7, "head"))
    random = Node("aten.native_dropout.default", (y, 0.5, True), (block, mask), inplace=((y, "aten.dropout_.default"),))
    inner = Node("aten.mm.default", (x, y), (grad,))
    return Graph(
        (w, tied, x, lr),
        (
            forward,
            Node("aten.select.int", (y, 0, 1), (row,), source=Source("net.py", 8)),
            random,
            Node("aten._assert_async.msg", (mask, 'all "kept"; at least one'), (), after=(forward,)),
            Node(
                "aten.linear_backward.default",
                (x, block),
                (None, grad, None),
                after=(forward, random),
                body=Graph((x, y), (inner,), (grad,)),
            ),
            Node("py.mul", (lr, -1), (rate,)),
            Node("aten.add_.Tensor", (w, grad), (), (("alpha", rate),), writes=((w, after),), source=Source("a dir/net.py", 9, 'x"y')),
        ),
        (block, after),
    )


def example() -> str:
    """The graph in the module's docstring."""
    assert text_module.__doc__ is not None
    lines = text_module.__doc__.split("\n\n")[1].split("\n")
    return "\n".join(line[4:] for line in lines) + "\n"


def test_a_training_step_prints_as_it_should(golden: Callable[[str, str], None]) -> None:
    graph = training_step()
    check_graph(graph)
    golden("training_step.txt", to_text(graph))


@pytest.mark.parametrize("text", [to_text(training_step()), example(), "def graph():\n    return ()\n"])
def test_text_reads_back(text: str) -> None:
    graph = parse(text)
    check_graph(graph)
    assert to_text(graph) == text


@given(graphs())
def test_every_graph_reads_back(graph: Graph) -> None:
    text = to_text(graph)
    again = parse(text)
    assert to_text(again) == text
    assert predecessors(again) == predecessors(graph)
    check_graph(again)


@given(graphs(max_nodes=6))
def test_nothing_is_lost(graph: Graph) -> None:
    """Text could print alike what is not alike: so compare what it reads back to with the graph itself, field by field."""
    assert shape_of(parse(to_text(graph))) == shape_of(graph)


def shape_of(graph: Graph) -> object:
    """Everything about a graph but the identity of its parts."""
    index_of = {node: index for index, node in enumerate(graph.nodes)}
    nodes = [
        (
            node.op,
            repr(tuple(map(plain, node.args))),
            repr([(key, plain(arg)) for key, arg in node.kwargs]),
            [None if value is None else plain(value) for value in node.outputs],
            [(plain(before), plain(after)) for before, after in node.writes],
            [index_of[other] for other in node.after],
            [(plain(value), overload) for value, overload in node.inplace],
            None if node.body is None else shape_of(node.body),
            node.source,
        )
        for node in graph.nodes
    ]
    return [*map(plain, graph.inputs)], nodes, [*map(plain, graph.outputs)]


def plain(arg: Arg) -> object:
    """An argument with the fields of values and storages in their places."""
    if isinstance(arg, tuple):
        return tuple(map(plain, arg))
    if not isinstance(arg, Value):
        return arg
    storage = arg.storage
    return (arg.name, arg.dtype, arg.shape, arg.stride, arg.offset, arg.version, storage.name, storage.nbytes, storage.device, storage.kind)


@pytest.mark.parametrize(
    ("arg", "text"),
    [
        (-0.0, "-0.0"),
        (1e300, "1e+300"),
        (5e-324, "5e-324"),
        (INF, 'float("inf")'),
        (-INF, 'float("-inf")'),
        (NAN, 'float("nan")'),
        (complex(NAN, -INF), 'complex(float("nan"), float("-inf"))'),
        (complex(-0.0, 1), "complex(-0.0, 1.0)"),
        (True, "True"),
        (1, "1"),
        (10**100, str(10**100)),
        (None, "None"),
        ("a\n\"'\\\u2028; at #\ud800", r'"a\n\"' + r"'\\\u2028; at #\ud800" + '"'),
        ((), "()"),
        ((1,), "(1,)"),
        ((1, (2, -3), (True,)), "(1, (2, -3), (True,))"),
        (Atom("device", "cuda:0"), 'device("cuda:0")'),
        (4 * S0**2, 'size("4*s0**2")'),
        (sympy.Integer(4), "4"),
    ],
)
def test_arguments(arg: Arg, text: str) -> None:
    graph = Graph((), (Node("aten.make.default", (arg,), (), (("key", arg),)),), ())
    assert to_text(graph).splitlines()[1] == f"    aten.make.default({text}, key={text})"
    again = parse(to_text(graph)).nodes[0]
    expected = 4 if arg == sympy.Integer(4) else arg
    assert repr((again.args, again.kwargs)) == repr(((expected,), (("key", expected),)))


def test_names_that_are_words_of_python_stay_names() -> None:
    first = compute("and", nbytes=1)
    names = ["return", "def", "inf", "nan", "float", "size", "dtype", "n0", "in", "on", "at"]
    nodes = [first, *(compute(name, first.results[0], nbytes=1) for name in names)]
    last = compute("all", *(node.results[0] for node in nodes))
    graph = Graph((), (*nodes, last), (nodes[1].results[0],))
    assert shape_of(parse(to_text(graph))) == shape_of(graph)


def test_symbolic_sizes_read_back() -> None:
    x = Value("x", Storage("x", 4 * S0 + 4, "cpu", Kind.INPUT), "float32", (sympy.Max(1, S0), 2), (sympy.floor(S0 / 2), 1), S0 - 1)
    text = to_text(Graph((x,), (), (x,)))
    assert "    x,  # float32[Max(1, s0), 2] strides[floor(s0/2), 1] offset[s0 - 1] 4*s0 + 4 B input cpu\n" in text
    assert plain(parse(text).inputs[0]) == plain(x)


def test_sizes_are_compared_as_they_read_back() -> None:
    mixed = Value("x", Storage("x", 8, "cpu", Kind.INPUT), "uint8", (sympy.Symbol("s1"), S0), (sympy.Symbol("s0"), 1))
    assert "strides" not in to_text(Graph((mixed,), (), ()))


def test_a_write_that_leaves_something_else_is_written_out() -> None:
    p = array(Storage("p", 4, "cpu", Kind.PARAMETER))
    node = replace(write(p), writes=((p, replace(p, name="q", shape=(2,), version=7)),))
    text = to_text(Graph((p,), (node,), ()))
    assert "writes p -> q: uint8[2] version[7] on p\n" in text
    assert to_text(parse(text)) == text


def test_bodies_nest_deeper_than_python_recurses() -> None:
    graph = Graph((), (), ())
    for _ in range(1500):
        graph = Graph((), (Node("aten.loop.default", (), (), body=graph),), ())
    text = to_text(graph)
    assert to_text(parse(text)) == text


def outside() -> Value:
    return array(Storage("p", 4, "cpu", Kind.INPUT))


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (compute("a", outside()), "value p is read before anything makes it"),
        (compute("a", after=(compute("b"),)), "expected control edges to nodes further up"),
        (compute("a b"), "expected an identifier as the name of a value or storage, got 'a b'"),
        (compute("None"), "expected a name of its own for each value, got 'None'"),
        (Node("a; b.c", (), ()), "expected an operator's name such as 'aten.add.Tensor'"),
        (Node("aten.a", (), (), (("a b", 1),)), "expected an identifier as the name of an argument, got 'a b'"),
        (Node("aten.a", ([1],), ()), "expected an argument that a graph can hold, got a list"),
        (Node("aten.a", (Atom("file", "x"),), ()), "expected an Atom of kind dtype, device, layout, memory_format, got 'file'"),
        (Node("aten.a", (10**5000,), ()), "expected an argument that can be written out"),
        (Node("aten.a", (sympy.sin(S0),), ()), "size 'sin(s0)': expected one of the functions"),
        (Node("aten.a", (), (replace(array(Storage("d", 1, "cpu", Kind.INPUT)), dtype="a b"),)), "expected the name of a dtype"),
        (
            compute("a", inplace=((array(Storage("c", 1, "cpu", Kind.INPUT)), "x y"),)),
            "expected the name of an operator that works in place",
        ),
        (
            Node("aten.a", (), (array(Storage("d", 1, "cpu; at", Kind.INPUT)),)),
            "expected a device such as 'cpu' or 'cuda:0', got 'cpu; at'",
        ),
    ],
)
def test_what_text_cannot_hold_is_refused(node: Node, expected: str) -> None:
    with pytest.raises(FormatError, match=rf"node 0 \({re.escape(node.op)}\): {re.escape(expected)}"):
        to_text(Graph((), (node,), ()))


def test_deeply_nested_arguments_are_refused() -> None:
    arg: Arg = ()
    for _ in range(60):
        arg = (arg,)
    with pytest.raises(FormatError, match="expected an argument nested at most 50 deep"):
        to_text(Graph((), (Node("aten.a", (arg,), ()),), ()))


def test_names_that_are_not_unique_are_refused() -> None:
    a = compute("a")
    for other, expected in (
        (compute("a"), "expected a name of its own for each value, got 'a'"),
        (view(replace(compute("a").results[0], name="b"), "c"), "value b is read before"),
        (
            Node("aten.a", (), (array(Storage("a", 4, "cpu", Kind.ACTIVATION), "b"),)),
            "expected storages of different names, got two named 'a'",
        ),
        (a, "expected each node once"),
    ):
        with pytest.raises(FormatError, match=expected):
            to_text(Graph((), (a, other), ()))


GOOD = """def graph(
    p,  # uint8[4] 4 B parameter cpu
):
    a = aten.make.default(p, 2)  # n0; uint8[4] 4 B activation cpu
    b = aten.make.default(a)  # uint8[4] 4 B activation cpu; after n0; takes a by aten.make_.default; at "a.py":3
    aten.copy_.default(p, b)  # writes p -> p_v1
    return (b,)
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "expected"),
    [
        (GOOD, "", 1, "expected the graph to go on to its 'return (...)', got the end of the text"),
        ("    return (b,)\n", "", 7, "expected the graph to go on to its 'return (...)', got the end of the text"),
        ("def graph(", "graph(", 1, "expected 'def graph(' or 'def graph():', got 'graph('"),
        ("):\n    a", "    a", 3, "expected an input such as 'x,  # float32[3] 12 B input cpu' or the closing '):', got 'a = "),
        ("    a =", "  a =", 4, "expected a line indented by 4 spaces, got '  a ="),
        ("    a =", "     a =", 4, "expected a line indented by 4 spaces, got '     a ="),
        ("return (b,)\n", "return (b,)\nimport os\n", 8, "expected nothing after the graph, got 'import os'"),
        ("return (b,)", "return (b, 1)", 7, "expected only values to be returned"),
        ("return (b,)", "return (b,) # x", 7, "expected the end of the line, got ' # x'"),
        ("return (b,)", "return (b)", 7, "expected ',', got ')'"),
        ("return (b,)", "return (c,)", 7, "expected the name of a value made above, got 'c,)'"),
        ("return (b,)", "return b", 7, "expected a call such as 'y = aten.relu.default(x)' or 'return (...)', got 'return b'"),
        ("a = aten.make.default(p, 2)", "a = __import__('os')", 4, "expected a call such as"),
        ("(p, 2)", "(p, 2", 4, "expected ',', got '  # n0;"),
        ("(p, 2)", "(p, c)", 4, "expected the name of a value made above, got 'c)"),
        ("(p, 2)", "(p, a)", 4, "expected the name of a value made above, got 'a)"),
        ("(p, 2)", "(p=p, 2)", 4, "expected an argument by keyword, as the one before it, got '2)"),
        ("(p, 2)", "(p, [2])", 4, "expected an argument, got ' [2])"),
        ("(p, 2)", "(p, lambda: 0)", 4, "expected the name of a value made above, got 'lambda: 0)"),
        ("(p, 2)", "(p, float(1))", 4, 'expected "inf", "-inf" or "nan", got \'1)'),
        ("(p, 2)", "(p, complex(p, 1))", 4, "expected a float, got 'p, 1))"),
        ("(p, 2)", '(p, "\\x")', 4, "expected a string as JSON writes it, got"),
        ("(p, 2)", "(p, dtype(2))", 4, "expected a string in double quotes, got '2))"),
        ("(p, 2)", '(p, size("a b"))', 4, "size 'a b': expected the end, got b"),
        ("(p, 2)", f"(p, {'9' * 5000})", 4, "expected an integer that Python can read, got '9999"),
        ("(p, 2)", f"(p, ({'9' * 5000},))", 4, "expected integers that Python can read"),
        ("(p, 2)", f"(p, {'(' * 60})", 4, "expected an argument nested at most 50 deep"),
        ("  # n0; ", "  n0; ", 4, "expected a comment ('  # ...') or the end of the line, got 'n0;"),
        ("  # n0; uint8[4] 4 B activation cpu", "", 4, "expected a comment that says what a is"),
        ("a = aten", "p = aten", 4, "expected the name of a new value, got 'p'"),
        ("a = aten", "None = aten", 4, "expected the name of a new value, got 'None'"),
        ("4 B activation cpu\n", "5 B activations cpu\n", 4, "expected a kind of storage, one of parameter, buffer,"),
        ("4 B activation cpu\n", "on q\n", 4, "expected the name of a storage introduced above, got 'q'"),
        ("4 B activation cpu\n", "4 B activation cpu in p\n", 4, "expected a new storage, got 'p' for the second time"),
        ("4 B activation cpu\n", "four\n", 4, "expected what a is, such as 'float32[3] 12 B activation cpu' or 'float32[3] on x', got"),
        ("4 B activation cpu\n", "4.00 KiB activation cpu\n", 4, "expected '4 B', got '4.00 KiB'"),
        ("4 B activation cpu\n", "4.00 KiB = 5 B activation cpu\n", 4, "expected '5 B', got '4.00 KiB = 5 B'"),
        ("uint8[4] 4 B activation cpu\n", "odd[4] 4.00 KiB activation cpu\n", 4, "expected the exact bytes, got '4.00 KiB'"),
        ("uint8[4] 4 B activation cpu\n", "uint8[s] 4*s + B activation cpu\n", 4, "expected a dimension or an integer"),
        ("after n0", "after n1", 5, "expected the label of a node above, got 'n1'"),
        ("after n0", "after b", 5, "expected the label of a node above, got 'b'"),
        ("takes a by", "takes c by", 5, "expected the name of a value made above, got 'c'"),
        ("; after n0; takes a by aten.make_.default", "; takes a by aten.make_.default; after n0", 5, "expected clauses in their order"),
        ("takes a by", "gives a by", 5, "expected clauses in their order"),
        ('"a.py":3', "a.py:3", 5, "expected a source such as"),
        ('"a.py":3', '"\\x":3', 5, "expected strings as JSON writes them"),
        (
            "  # uint8[4] 4 B activation cpu; after",
            "  # n0; uint8[4] 4 B activation cpu; after",
            5,
            "expected a new label, got n0 for the second time",
        ),
        ("writes p -> p_v1", "writes c -> p_v1", 6, "expected the name of a value made above, got 'c'"),
        ("writes p -> p_v1", "writes p -> b", 6, "expected the name of a new value, got 'b'"),
    ],
)
def test_a_text_that_does_not_read_is_refused_with_its_line(old: str, new: str, line: int, expected: str) -> None:
    text = GOOD.replace(old, new, 1)
    assert text != GOOD
    with pytest.raises(FormatError, match=rf"^line {line}: .*{re.escape(expected)}"):
        parse(text)


def test_good_text_is_good() -> None:
    assert to_text(parse(GOOD)) == GOOD


@pytest.mark.parametrize("size", range(0, len(GOOD) - 1, 7))
def test_a_truncated_text_is_refused(size: int) -> None:
    with pytest.raises(FormatError, match=r"^line \d+: "):
        parse(GOOD[:size])
