"""Splitting changes no value and no edge that matters, and lets a weight's gradient wait."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.ir.check.graph_check import check_graph
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.rewrite.base import replace_nodes
from lowtide.rewrite.results import split_results


def _value(name, kind=Kind.ACTIVATION, numel=4):
    return Value(name, Storage(name, 4 * numel, "cpu", kind), "float32", (numel,), (1,))


def _backward(mask, outputs, after=()):
    grad, x, w = (_value(name, Kind.INPUT) for name in ("grad", "x", "w"))
    args = (grad, x, w, None, (1,), (0,), (1,), False, (0,), 1, mask)
    node = Node("aten.convolution_backward.default", args, outputs, after=after)
    return Graph((grad, x, w), (node,), tuple(output for output in outputs if output is not None))


def test_input_gradient_parts_from_weight_and_bias():
    outputs = (_value("dx"), _value("dw"), _value("db"))
    split = split_results(_backward((True, True, True), outputs))
    first, second = split.graph.nodes
    assert (first.args[10], first.outputs) == ((True, False, False), (outputs[0], None, None))
    assert (second.args[10], second.outputs) == ((False, True, True), (None, outputs[1], outputs[2]))
    assert list(split.forward.values()) == [(first, second)]
    check_graph(split.graph)


def test_what_one_kernel_computes_stays_one_node():
    graph = _backward((False, True, True), (None, _value("dw"), _value("db")))
    split = split_results(graph)
    assert split.graph.nodes == graph.nodes
    assert not split.forward


def test_control_edges_follow_what_their_ends_became():
    old = Node("aten.rand.default", ((4,),), (_value("a"),))
    later = Node("aten.rand.default", ((4,),), (_value("b"),), after=(old,))
    parts = (replace(old, outputs=(_value("a1"),)), replace(old, outputs=(_value("a2"),)))
    new = replace_nodes(Graph((), (old, later), ()), {old: parts})
    assert new.graph.nodes[2].after == parts
    assert new.forward[later] == (new.graph.nodes[2],)


def _deep_and_narrow_at_the_end():
    """Large early activations, a large late weight: its gradient should not be made while those are held."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(4),
        nn.Conv2d(16, 512, 4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(512, 4),
    )
    return model, (torch.randn(1, 3, 96, 96), torch.tensor([1])), torch.optim.SGD(model.parameters(), 0.1)


def test_split_step_needs_less_and_trains_the_same():
    (model, batch, optimizer), (twin, _, twins) = _deep_and_narrow_at_the_end(), _deep_and_narrow_at_the_end()
    step = lowtide.optimize(model, batch, loss=lambda model, x, y: F.cross_entropy(model(x), y), optimizer=optimizer)
    whole = next(g for g in [step.plan.graph])
    assert sum(node.op == "aten.convolution_backward.default" for node in whole.nodes) == 3, (
        "two convolutions, of which one has an input gradient"
    )
    for _ in range(3):
        twins.zero_grad()
        expected = F.cross_entropy(twin(batch[0]), batch[1])
        expected.backward()
        twins.step()
        assert torch.equal(step(*batch), expected.detach())
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
