"""Recomputed copies compute the same bits, on real operators, and what must not be repeated is refused."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide.planning.machine as machine
from lowtide.errors import CheckError
from lowtide.ir.check.graph_check import check_graph
from lowtide.ir.graph import Graph, Kind, Node
from lowtide.ir.operators.nodes import is_random, is_view, repeatable
from lowtide.remat.write_out import rematerialise
from lowtide.schedule import ProgramOrder
from tests.programs import RandomOrder
from tests.small_graph import GRAPH, RELU, SIN, VIEW, A, B, C, X, a_value
from tests.training import check


def test_the_second_run_is_a_node_of_its_own_and_views_follow_it():
    done = rematerialise(GRAPH, [0, 2, 0, 3])
    check_graph(done.graph)
    relu, sin, again, view, mul = done.graph.nodes
    assert (relu, sin) == (RELU, SIN)
    assert again.args == (X,)
    assert again.outputs[0].storage is not A.storage
    assert view.outputs[0].storage is again.outputs[0].storage
    assert mul.args == (view.outputs[0], B)
    assert done.origins == (0, 2, 0, 1, 3)
    assert done.recomputed == (2,)
    assert done.rewritten.forward[RELU] == (relu, again)


def test_a_sequence_without_repetition_gives_the_same_nodes():
    done = rematerialise(GRAPH, [0, 2, 3])
    assert {node.op for node in done.graph.nodes} == {node.op for node in GRAPH.nodes}
    assert not done.rewritten.forward
    assert not done.recomputed


def test_runs_that_cannot_be_are_refused():
    with pytest.raises(CheckError, match=r"node 2 \(aten.sin.default\) reads \(a\) to be there"):
        rematerialise(GRAPH, [2, 0, 3])
    with pytest.raises(CheckError, match=r"expected every node, got no node 2 \(aten.sin.default\)|reads \(b\) to be there"):
        rematerialise(GRAPH, [0, 3])
    with pytest.raises(CheckError, match="expected no node that only makes views"):
        rematerialise(GRAPH, [0, 1, 2, 3])
    draw = Node("aten.bernoulli.p", (X, 0.5), (A,))
    with pytest.raises(CheckError, match="once, since it is random or writes"):
        rematerialise(Graph((X,), (draw,), (A,)), [0, 0])


def test_random_and_writing_operators_are_not_repeatable_but_batch_norm_is():
    stats = [a_value(name, kind=Kind.BUFFER) for name in ("mean", "var")]
    after = tuple((each, a_value(f"{each.name}_1", each.storage, version=1)) for each in stats)
    norm = Node("aten.native_batch_norm.default", (X, None, None, *stats, True, 0.1, 1e-5), (A, B, C), writes=after)
    again = repeatable(norm)
    assert again is not None
    assert again.args[3:5] == (None, None)
    assert not again.writes
    assert repeatable(Node("aten.add_.Tensor", (stats[0], X), (), writes=after[:1])) is None
    assert repeatable(Node("aten.bernoulli.p", (X, 0.5), (A,))) is None
    attention = Node("aten._scaled_dot_product_flash_attention_for_cpu.default", (X, X, X, 0.1), (A,))
    assert is_random(attention)
    assert not is_random(Node(attention.op, (X, X, X, 0.0), (A,)))
    assert not is_random(Node(attention.op, (X, X, X), (A,)))
    assert is_view(VIEW)
    assert not is_view(RELU)


def test_a_view_that_is_returned_is_taken_before_its_base_is_written_over():
    w = a_value("w", kind=Kind.PARAMETER)
    after, flat = a_value("w_1", w.storage, version=1), a_value("flat", w.storage)
    row = a_value("row", w.storage)
    views = Node("aten.view.default", (w,), (flat,)), Node("aten.select.int", (flat, 0, 0), (row,))
    write = Node("aten.mul_.Tensor", (w, 2.0), (), writes=((w, after),))
    done = rematerialise(Graph((w,), (*views, write), (row,)), [2])
    check_graph(done.graph)
    assert done.graph.nodes == (*views, write)


class _Net(nn.Module):
    """Batch norm, dropout, residuals, views, attention, tied weights: what recomputation has got wrong elsewhere."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.lift, self.layer = nn.Linear(8, 16), nn.LayerNorm(16)
        self.mix, self.tied = nn.Linear(16, 48), nn.Linear(16, 16)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        x = self.layer(self.lift(x))
        q, k, v = self.mix(x).chunk(3, -1)
        x = x + self.drop(torch.softmax(q @ k.transpose(1, 2), -1)) @ v
        return self.tied(F.gelu(self.tied(x))).mean((1, 2))


def _make(optimizer):
    def make():
        torch.manual_seed(3)
        model = _Net()
        batch = torch.randn(4, 3, 6, 6), torch.randn(4)
        return model, batch, lambda model, x, y: F.mse_loss(model(x), y), optimizer(model.parameters())

    return make


@pytest.mark.parametrize("seed", range(4))
def test_training_with_random_recomputation_is_bit_equal_to_eager(seed, monkeypatch):
    written = []

    def recomputing(graph):
        done = rematerialise(graph, _random_runs(graph, random.Random(seed)))
        written.append(len(done.recomputed))
        check_graph(done.graph)
        return (done.graph,)

    monkeypatch.setattr(machine, "equal_graphs", recomputing)
    optimizer = [torch.optim.AdamW, lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9)][seed % 2]
    check(_make(optimizer), options={"solver": ProgramOrder() if seed < 2 else RandomOrder(seed)})
    assert min(written) > 10  # so that there was something to get wrong


def _random_runs(graph, rng):
    """All nodes in program order, and before many of them some of what they read once more, while its own inputs are as they were."""
    makers = {value.storage: index for index, node in enumerate(graph.nodes) for value in node.outputs if value and not is_view(node)}
    version, sequence = {}, []
    for index, node in enumerate(graph.nodes):
        if is_view(node):
            continue
        for value in node.inputs:
            maker = makers.get(value.storage)
            if maker is not None and rng.random() < 0.4:
                sequence += _again(graph, maker, makers, version, rng)
        sequence.append(index)
        version.update({after.storage: after.version for _, after in node.writes})
    return sequence


def _again(graph, index, makers, version, rng):
    node = graph.nodes[index]
    again = repeatable(node)
    if again is None or any(value.version != version.get(value.storage, 0) for value in again.inputs):
        return []
    deeper = [makers[value.storage] for value in again.inputs if value.storage in makers and rng.random() < 0.3]
    return [*(run for maker in deeper for run in _again(graph, maker, makers, version, rng)), index]
