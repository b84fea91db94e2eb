"""Rules of the algebra that round: as near to float64 as eager is, and nothing that planning sees unless it is asked for."""

import random
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.ir.check.graph_check import check_graph
from lowtide.ir.text.graph_text import parse
from lowtide.rewrite.rewritings import ALIGNMENT, RULES, rewrite, rewritings
from tests.graph_runs import inference_graph, run, training_graph
from tests.weighed import Weighed

NAMES = {rule.name: rule for rule in RULES}


class Folded(nn.Module):
    """A convolution and a batch norm whose statistics are given."""

    def __init__(self, dtype, **settings):
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 16, 3, bias=settings.pop("bias", False)), nn.BatchNorm2d(16, **settings)
        self.to(dtype).eval()

    def forward(self, x):
        return F.relu(self.norm(self.first(x)))


def exponential(dtype):
    """With a product on either side, which holds what the rule lets the gradient read."""
    model = Weighed((64, 130), lambda x: F.elu(x * 1.5, 0.7).square(), dtype)
    return training_graph(model, (), lambda model: model().sum(), lambda model: tuple(each.grad for each in model.parameters()))


def normed(dtype, shape=(64, 130), over=1):
    """As `exponential`."""
    model = Weighed(shape, lambda x: F.layer_norm(x * 1.5, shape[-over:]).square(), dtype)
    return training_graph(model, (), lambda model: model().sum(), lambda model: tuple(each.grad for each in model.parameters()))


class Gated(nn.Module):
    """Two products of one argument, whose gradient is a sum of products."""

    def __init__(self, dtype, shape, width=40):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(*shape, 48, dtype=dtype))
        self.one, self.other = (nn.Linear(48, width, bias=False, dtype=dtype) for _ in range(2))

    def forward(self):
        x = self.x * 1.5
        return self.one(x).tanh() * self.other(x)


def gated(dtype, shape=(64,), width=40):
    return training_graph(
        Gated(dtype, shape, width), (), lambda model: model().sum(), lambda model: tuple(each.grad for each in model.parameters())
    )


class Scored(nn.Module):
    """Scores of words that are no multiple of 8: with a bias or without, of a batch of products, between other layers."""

    def __init__(self, dtype, words=37, width=24, batched=False, bias=False):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(*((3,) if batched else ()), 10, width, dtype=dtype))
        self.w = nn.Parameter(torch.zeros(*((3,) if batched else ()), words, width, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(words, dtype=dtype)) if bias else None

    def forward(self):
        x, w = self.x * 1.5, self.w.transpose(-1, -2)
        scores = x @ w if self.bias is None else torch.addmm(self.bias, x, w)
        return scores.sigmoid().square()


def on_a_gpu(graph):
    """The graph as it would be captured there; operators that are given a device keep theirs."""
    return parse(re.sub(r"(  #.*) cpu", r"\1 cuda:0", str(graph)))


def scored(dtype, **settings):
    model = Scored(dtype, **settings)
    return on_a_gpu(training_graph(model, (), lambda model: model().sum(), lambda model: tuple(p.grad for p in model.parameters())))


def convolved(dtype, transposed=False, **settings):
    """A convolution whose weight is fixed, so that the gradient of its input is alone."""
    make = nn.ConvTranspose2d if transposed else nn.Conv2d

    class Convolved(Weighed):
        def __init__(self):
            torch.manual_seed(0)
            fixed = make(4, 6, 3, **settings).to(dtype).requires_grad_(False)
            super().__init__((2, 4, 11, 8), lambda x: fixed(x.square()).square(), dtype)
            self.fixed = fixed

    model = Convolved()
    return training_graph(model, (), lambda model: model().sum(), lambda model: (model.x.grad, model.w.grad))


class Linear(nn.Module):
    """A linear layer and a batch norm whose statistics are given; through a view, as some networks have it."""

    def __init__(self, dtype, bias=True, tokens=False, **settings):
        super().__init__()
        self.first, self.norm, self.tokens = nn.Linear(20, 16, bias=bias), nn.BatchNorm1d(16, **settings), tokens
        self.to(dtype).eval()

    def forward(self, x):
        x = self.first(x)
        return F.relu(self.norm(x.flatten(0, 1)).reshape_as(x) if self.tokens else self.norm(x))


def linear(dtype, **settings):
    shape = (2, 5, 20) if settings.get("tokens") else (9, 20)
    return inference_graph(Linear(dtype, **settings), (torch.zeros(shape, dtype=dtype),))


def folded(dtype, **settings):
    return inference_graph(Folded(dtype, **settings), (torch.zeros(2, 8, 20, 20, dtype=dtype),))


ROUNDED = {"gradients of ELU from results": [exponential], "batch norms folded into convolutions": [
    folded, lambda dtype: folded(dtype, bias=True), lambda dtype: folded(dtype, affine=False),
], "batch norms folded into linear layers": [
    linear, lambda dtype: linear(dtype, bias=False), lambda dtype: linear(dtype, tokens=True), lambda dtype: linear(dtype, affine=False),
], "gradients of layer norms without a weight from results": [normed, lambda dtype: normed(dtype, (5, 3, 4, 6), 2)],
"gradients of what convolutions read without that": [
    convolved, lambda dtype: convolved(dtype, stride=2, padding=1), lambda dtype: convolved(dtype, groups=2, dilation=(1, 2)),
    lambda dtype: convolved(dtype, transposed=True, stride=2, output_padding=1),
],
"products added as they are made": [gated, lambda dtype: gated(dtype, (4, 16))],
"products padded to rows that tensor cores read": [
    scored, lambda dtype: scored(dtype, bias=True), lambda dtype: scored(dtype, batched=True),
    lambda dtype: scored(dtype, words=40, width=21),
]}  # fmt: skip


def plain_inputs(graph, seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randn(value.shape, generator=generator) for value in graph.inputs]
    return [0.125 if value.dtype == "scalar" else each.abs() + 0.1 if "var" in value.name else each
            for value, each in zip(graph.inputs, numbers, strict=True)]  # fmt: skip


def as_(dtype, inputs):
    return [each.to(dtype) if isinstance(each, torch.Tensor) and each.dim() else each for each in inputs]


def test_every_rule_that_rounds_is_shown():
    assert ROUNDED.keys() == {rule.name for rule in RULES if not rule.exact}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "make"), [(name, make) for name, makes in ROUNDED.items() for make in makes])
def test_rules_that_round_stay_as_near_as_eager(name, make, dtype):
    """The distance from what float64 gives, of all elements of a tensor (root of squares), is at most 4 times eager's own."""
    graph, reference = make(dtype), make(torch.float64)
    done = rewrite(graph, [NAMES[name]])
    assert len(done.applied) == 1
    check_graph(done.graph)
    for seed in range(3):
        inputs = as_(dtype, plain_inputs(graph, seed))
        count = len(graph.outputs)
        exact = run(reference, as_(torch.float64, inputs))[:count]
        for ours, eager, best in zip(run(done.graph, inputs)[:count], run(graph, inputs)[:count], exact, strict=True):
            allowed = 4 * (eager.double() - best).norm() + torch.finfo(dtype).eps * best.norm()
            assert (ours.double() - best).norm() <= allowed


@pytest.mark.parametrize(("name", "make"), [(name, make) for name, makes in ROUNDED.items() for make in makes])
def test_planning_sees_no_rule_that_rounds_unless_it_is_asked_for(name, make):
    graph = make(torch.float32)

    def times(nodes, among):
        return [-float(any("padded" in value.name for value in node.results)) for node in nodes]  # which is done where it spares time

    for exact in (True, False):
        found = {applied_rule.rule for each in rewritings(graph, times, exact=exact) for applied_rule in each.applied_rules}
        assert (name in found) is not exact
        assert not exact or all(NAMES[rule].exact for rule in found)


def test_padding_comes_beside_what_holds_less_and_only_where_it_spares_time():
    """Whatever single places take: with and without it each rewriting is offered once, none fails, and exact ones know nothing of it."""
    graph = on_a_gpu(gated(torch.bfloat16, width=41))
    padded = 0
    for seed in range(20):
        generator = random.Random(seed)
        us = dict[object, float]()

        def times(nodes, among, us=us, generator=generator):
            return [us.setdefault(node, generator.choice((0.0, 1.0, 5.0))) for node in nodes]

        exact, rounding = ([*rewritings(graph, times, exact=each)] for each in (True, False))
        assert not any(each.is_padded for each in exact)
        assert [each.is_padded for each in rounding].count(True) <= 1
        padded += rounding[-1].is_padded
        keys = [frozenset(rule.key for rule in each.applied_rules) for each in rounding]
        assert len(set(keys)) == len(keys)
        for each in rounding:
            assert all(rule.cost_us < 0 for rule in each.applied_rules if rule.rule == ALIGNMENT.name)
            assert not each.is_padded or {rule.key for rule in each.applied_rules if rule.rule != ALIGNMENT.name} in (*keys, set())
    assert 0 < padded < 20


def test_a_bias_of_one_number_is_left_to_be_spread():
    graph = parse(
        """def graph(
    b,  # bfloat16[1] 2 B parameter cuda:0
    w,  # bfloat16[8, 13] 208 B parameter cuda:0
    x,  # bfloat16[6, 8] 96 B input cuda:0
):
    scores = aten.addmm.default(b, x, w)  # bfloat16[6, 13] 156 B activation cuda:0
    return (scores,)
"""
    )
    assert rewrite(graph, [ALIGNMENT]).applied == ()
