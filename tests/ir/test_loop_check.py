"""The checker goes into loops: every rule of theirs, broken once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import optim

from lowtide.errors import CheckError
from lowtide.ir.bodies import is_loop
from lowtide.ir.check.graph_check import check_graph
from lowtide.ir.check.verdict import Verdict
from lowtide.ir.graph import Graph, Kind, Node, Storage
from lowtide.ir.shapes.dimension import Dimension
from lowtide.rewrite.base import replace_nodes
from tests.loops import captured, made, nodes_of
from tests.splits import along, split


@pytest.fixture(scope="module")
def graph() -> Graph:
    """A product, its sum over rows and a written argument, in three parts."""
    x, w = torch.randn(10, 4), torch.randn(4, 4)
    program = captured(lambda x, w: (torch.tanh(x @ w), (x @ w).sum(0)), (x, w))
    return split(program.graph, along(program.graph.nodes, made(program.graph, "mm"), 0), 3).graph


@pytest.fixture(scope="module")
def update() -> Graph:
    """The update of a parameter, in two parts."""
    x, w = torch.randn(6, 4), torch.randn(4, 4)
    program = captured(lambda x, w: (x @ w).sum(), (x,), (w,), lambda given: optim.SGD(given, lr=0.1, momentum=0.9))
    written = [node for node in program.graph.nodes if node.writes and len(node.writes[0][0].shape) == 2]
    return split(program.graph, along(written, written[-1].writes[0][0], 0), 2).graph


def loop_of(graph: Graph) -> Node:
    return next(node for node in graph.nodes if is_loop(node))


def refuses(graph: Graph, verdict: Verdict, **changes) -> None:
    loop = loop_of(graph)
    changed = replace_nodes(graph, {loop: (replace(loop, **changes),)}).graph
    with pytest.raises(CheckError, match=verdict.value):
        check_graph(changed)


def said(graph: Graph, **changes) -> tuple[tuple[str, object], ...]:
    return tuple((dict(loop_of(graph).kwargs) | changes).items())


def body_of(graph: Graph, *, nodes=None, **changes) -> Graph:
    body = loop_of(graph).body
    assert body is not None
    return replace(body, nodes=tuple(nodes) if nodes is not None else body.nodes, **changes)


def test_what_is_right_passes(graph, update):
    check_graph(graph)
    check_graph(update)


def test_its_form(graph):
    refuses(graph, Verdict.LOOP_FORM, body=None)
    refuses(graph, Verdict.LOOP_FORM, kwargs=said(graph)[1:])
    refuses(graph, Verdict.LOOP_FORM, kwargs=said(graph, part=3))
    refuses(graph, Verdict.LOOP_FORM, kwargs=said(graph, extent=2))
    refuses(graph, Verdict.LOOP_FORM, body=body_of(graph, dimensions=(Dimension("part", 1, 4), Dimension("other", 1, 4))))


def test_its_ends(graph):
    loop = loop_of(graph)
    refuses(graph, Verdict.LOOP_ENDS, kwargs=said(graph, extent=20))
    refuses(graph, Verdict.LOOP_ENDS, kwargs=said(graph, along=(1, *dict(loop.kwargs)["along"][1:])))
    refuses(graph, Verdict.LOOP_ENDS, kwargs=said(graph, along=(None, *dict(loop.kwargs)["along"][1:])))
    refuses(graph, Verdict.LOOP_ENDS, kwargs=said(graph, along=(0,)))
    refuses(graph, Verdict.LOOP_ENDS, args=loop.args[::-1])


def test_its_results(graph):
    body = loop_of(graph).body
    assert body is not None
    adding = next(node for node in body.nodes if node.op == "aten.add_.Tensor")
    others = [node for node in body.nodes if node is not adding]
    refuses(graph, Verdict.LOOP_RESULT, body=body_of(graph, nodes=others, outputs=()))
    wrong = replace(adding, op="aten.mul_.Tensor")
    refuses(graph, Verdict.LOOP_RESULT, body=body_of(graph, nodes=[*others, wrong]))
    into = dict(loop_of(graph).kwargs)["into"]
    refuses(graph, Verdict.LOOP_RESULT, kwargs=said(graph, into=tuple("max" if each == "sum" else each for each in into)))
    place = adding.writes[0][0]
    reading = Node(
        "aten.add.Tensor", (place, place), (replace(adding.args[1], name="new", storage=replace(adding.args[1].storage, name="new")),)
    )
    refuses(graph, Verdict.LOOP_RESULT, body=body_of(graph, nodes=[reading, *body.nodes]))


def test_its_writes(update):
    loop = loop_of(update)
    before, after = loop.writes[0]
    refuses(update, Verdict.LOOP_WRITES, writes=((before, replace(after, version=after.version + 1)), *loop.writes[1:]))
    along_ = dict(loop.kwargs)["along"]
    body = body_of(update)
    place = loop.args.index(before)
    whole = replace(body.inputs[place], shape=before.shape)
    inputs = tuple(whole if value is body.inputs[place] else value for value in body.inputs)
    more = replace(body, inputs=(*inputs[: len(along_)], body.inputs[place], *inputs[len(along_) :]))
    with pytest.raises(CheckError):
        check_graph(replace_nodes(update, {loop: (replace(loop, body=more),)}).graph)


def test_parts_share_nothing_that_they_write(update):
    """Another view of what is written, whole in every part, would show what parts before have left."""
    loop, body = loop_of(update), body_of(update)
    before = loop.writes[0][0]
    inner = body.inputs[loop.args.index(before)]
    whole = replace(inner, name="whole", shape=before.shape)
    along_ = dict(loop.kwargs)["along"]
    again = replace(before, name="again")
    changed = replace(
        loop,
        args=(*loop.args, again),
        kwargs=said(update, along=(*along_, None)),
        body=replace(body, inputs=(*body.inputs[: len(along_)], whole, *body.inputs[len(along_) :])),
    )
    view = Node("aten.alias.default", (before,), (again,))
    with pytest.raises(CheckError, match=Verdict.LOOP_SHARES.value):
        check_graph(replace_nodes(update, {loop: (view, changed)}).graph)


def test_nothing_is_repeated_or_drawn(graph):
    body = loop_of(graph).body
    assert body is not None
    (mm,) = nodes_of(body, "mm")[:1]
    weight = next(value for value in mm.inputs if all(isinstance(size, int) for size in value.shape))
    twice = replace(weight, name="twice", storage=replace(weight.storage, name="twice", kind=Kind.ACTIVATION), stride=(4, 1))
    refuses(graph, Verdict.LOOP_AGAIN, body=body_of(graph, nodes=[Node("aten.exp.default", (weight,), (twice,)), *body.nodes]))
    part = next(value for value in mm.inputs if value is not weight)
    noise = replace(part, name="noise", storage=replace(part.storage, name="noise", kind=Kind.ACTIVATION))
    refuses(graph, Verdict.LOOP_ONCE, body=body_of(graph, nodes=[Node("aten.bernoulli.p", (part, 0.5), (noise,)), *body.nodes]))


def test_what_it_may_take_over():
    """An argument that is cut and laid out as the first result is, and read before parts of that are written."""
    torch.manual_seed(0)
    program = captured(lambda x, w: torch.softmax(x @ w, 1) @ w, (torch.randn(10, 8), torch.randn(8, 8)))
    nodes = [*nodes_of(program.graph, "_softmax"), nodes_of(program.graph, "mm")[1]]
    graph = split(program.graph, along(nodes, made(program.graph, "_softmax"), 0), 3).graph
    check_graph(graph)
    (scores, weight), body = loop_of(graph).args, body_of(graph)
    refuses(graph, Verdict.LOOP_TAKES, inplace=((weight, "fission.loop"),))
    refuses(graph, Verdict.LOOP_TAKES, inplace=((scores, "aten.mm.out"),))
    late = Node("aten.tanh.default", (body.inputs[0],), (replace(body.nodes[0].results[0], name="late", storage=Storage(
        "late", body.nodes[0].results[0].storage.nbytes, "cpu", Kind.ACTIVATION
    )),))  # fmt: skip
    refuses(graph, Verdict.LOOP_TAKES, body=body_of(graph, nodes=[*body.nodes, late]))
