"""Every rule of the algebra on real tensors: the bits stay, and what is held for the backward pass is less."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lowtide.ir.check.graph_check import check_graph
from lowtide.rewrite.rewritings import RULES, rewrite
from tests.graph_runs import odd_inputs, run, same_bits, training_graph
from tests.weighed import Weighed

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NAMES = {rule.name: rule for rule in RULES}


def pooled(x, kernel=3, stride=2, padding=1, dilation=1, ceil_mode=False):
    return F.max_pool2d(F.relu(x), kernel, stride, padding, dilation, ceil_mode)


def chosen(x):
    return torch.where(x > 0.25, x * x, x.exp())


def entropy(x, reduction="none", weight=None):
    labels = torch.arange(len(x)) * 57 % x.shape[1]
    return F.cross_entropy(x, torch.where(labels == 57, -100, labels), weight, reduction=reduction)


# By rule: what it is shown on, and how large that is.
SHOWN = {
    "dropout's masks as bits": (lambda x: F.dropout(x, 0.3), (3, 5, 401)),
    "gradients let through before max-pooling's are spread": (pooled, (2, 3, 17, 13)),
    "max-pooling's indices as places in windows": (lambda x: F.max_pool2d(x.tanh(), 2), (2, 3, 17, 13)),
    "rectifiers' results as bits": (lambda x: F.relu(x) + x, (7, 403)),
    "masks as bits": (chosen, (7, 403)),
    "gradients of a cross entropy's scores in one go": (lambda x: entropy(x.tanh()), (7, 403)),
    "indices and labels in fewer bytes": (lambda x: x.tanh().max(1).values, (7, 403)),
}


def step(shape, function, dtype):
    return training_graph(Weighed(shape, function, dtype), (), lambda model: model().sum())


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_is_shown(name):
    assert (name in SHOWN) == NAMES[name].exact  # the others are shown among those that round


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.exact], ids=lambda rule: rule.name)
def test_the_bits_are_the_same_and_less_is_held(rule, dtype):
    function, shape = SHOWN[rule.name]
    graph = step(shape, function, dtype)
    done = rewrite(graph, [rule])
    assert [each.rule for each in done.applied] == [rule]
    check_graph(done.graph)
    place = done.applied[0].place
    assert place.now is None or place.now is place.storage or place.now.nbytes < place.storage.nbytes
    for seed in range(3):
        inputs = odd_inputs(graph, torch.Generator().manual_seed(seed))
        for ours, eager in zip(run(done.graph, inputs, seed), run(graph, inputs, seed), strict=True):
            assert same_bits(ours, eager)


@settings(max_examples=15)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(7, 19), st.integers(7, 19)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 1), st.integers(1, 2), st.booleans()),
    st.sampled_from(DTYPES),
)
def test_pooling_of_any_window(shape, window, dtype):
    kernel, stride, padding, dilation, ceil_mode = window
    graph = step(shape, lambda x: pooled(x, kernel, stride, min(padding, kernel // 2), dilation, ceil_mode), dtype)
    done = rewrite(graph)
    names = {each.rule.name for each in done.applied}
    assert "max-pooling's indices as places in windows" in names
    inputs = odd_inputs(graph, torch.Generator().manual_seed(shape[2]))
    for ours, eager in zip(run(done.graph, inputs), run(graph, inputs), strict=True):
        assert same_bits(ours, eager)


@settings(max_examples=10)
@given(
    st.tuples(st.integers(1, 70), st.integers(1, 9000)),
    st.sampled_from(["none", "mean", "sum"]),
    st.booleans(),
    st.sampled_from(DTYPES),
)
def test_cross_entropies_of_any_size(shape, reduction, weighed, dtype):
    weight = torch.linspace(0.5, 2, shape[1], dtype=dtype) if weighed else None
    graph = step(shape, lambda x: entropy(x * 1.5, reduction, weight), dtype)
    done = rewrite(graph)
    assert "gradients of a cross entropy's scores in one go" in {each.rule.name for each in done.applied}
    assert not any(node.op == "aten.nll_loss_backward.default" for node in done.graph.nodes)
    inputs = odd_inputs(graph, torch.Generator().manual_seed(shape[1]))
    for ours, eager in zip(run(done.graph, inputs), run(graph, inputs), strict=True):
        assert same_bits(ours, eager)


def test_a_cross_entropys_gradient_may_lie_where_its_logarithms_did():
    done = rewrite(step((7, 403), lambda x: entropy(x.tanh(), "mean"), torch.float32)).graph
    (node,) = (node for node in done.nodes if node.op == "lowtide.cross_entropy_backward.default")
    ((logarithms, overload),) = node.inplace
    grad, *rest = [torch.randn(each.shape) if each is logarithms else torch.tensor(0.7) for each in node.args[:2]]
    logs = torch.log_softmax(rest[0], 1)
    args = (grad, logs, torch.arange(7), None, 1, -100, torch.tensor(7.0))
    made = torch.ops.lowtide.cross_entropy_backward.default(*args)
    back = torch.ops.aten.nll_loss_backward.default(*args)
    assert same_bits(made, torch.ops.aten._log_softmax_backward_data.default(back, logs, 1, torch.float32))
    assert overload == "lowtide.cross_entropy_backward_.default"
    assert same_bits(torch.ops.lowtide.cross_entropy_backward_.default(*args), made)
    assert same_bits(logs, made)


class Net(nn.Module):
    """All that rules know of, one after another."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.wide, self.last = nn.Linear(8 * 4 * 4, 40), nn.Linear(40, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.first(x)), 3, 2, 1)
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        x = F.dropout(F.relu(self.wide(x.flatten(1))), 0.2)
        x = torch.where(x > 0.1, x, x.exp())
        return self.last(x) + x.max(1, keepdim=True).values


def test_all_rules_together():
    torch.manual_seed(0)
    model = Net()
    batch = (torch.randn(4, 3, 22, 22), torch.randint(0, 5, (4,)))
    graph = training_graph(model, batch, lambda model, x, y: F.cross_entropy(model(x), y))
    done = rewrite(graph, [rule for rule in RULES if rule.exact])
    check_graph(done.graph)
    assert {each.rule.name for each in done.applied} == SHOWN.keys()
    assert all(new in set(done.graph.nodes) for news in done.forward.values() for new in news)
    inputs = odd_inputs(graph, torch.Generator().manual_seed(1))
    for ours, eager in zip(run(done.graph, inputs), run(graph, inputs), strict=True):
        assert same_bits(ours, eager)


def test_only_what_is_wanted():
    graph = step(*reversed(SHOWN["masks as bits"]), torch.float32)
    assert rewrite(graph, wanted=lambda rule, place: False).graph.nodes == graph.nodes


def _left_alone(function, shape=(6, 101), rules=RULES):
    return not rewrite(step(shape, function, torch.float32), rules).applied


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x.t(), 0.5).t() * F.dropout(x, 0.5)[:1],  # parts and other layouts are no reason to fail
        lambda x: F.relu(x) * F.relu(x).exp(),  # the result is held for its own sake
        lambda x: F.threshold(x, 0.5, 0.0),
        lambda x: torch.where((x > 0)[:, :1], x, 0),  # a part of a mask
    ],
)
def test_what_may_fit_or_not_is_right(function):
    graph = step((6, 101), function, torch.float32)
    done = rewrite(graph)
    check_graph(done.graph)
    inputs = odd_inputs(graph, torch.Generator().manual_seed(1))
    for ours, eager in zip(run(done.graph, inputs), run(graph, inputs), strict=True):
        assert same_bits(ours, eager)


def test_a_result_that_is_held_for_its_own_sake_is_no_bits():
    assert _left_alone(lambda x: F.relu(x).square(), rules=[NAMES["rectifiers' results as bits"]])


def test_indices_that_the_caller_gets_stay():
    x = nn.Parameter(torch.zeros(1, 1, 8, 8))

    class Indices(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = x

        def forward(self):
            return F.max_pool2d(self.x * 2, 2, return_indices=True)

    def loss(model):
        y, indices = model()
        return y.sum(), indices

    graph = training_graph(Indices(), (), loss)
    assert not rewrite(graph, [NAMES["max-pooling's indices as places in windows"]]).applied


def everything(x):
    x = F.dropout(F.relu(torch.where(x > 0.1, x * x, x.sin())), 0.3)
    return F.dropout(x.t(), 0.3).t() + x.sort(0).values


@pytest.mark.parametrize("shape", [(0, 11), (11, 0), (1, 1), (1, 9), (65, 1)], ids=str)
def test_what_is_empty_or_hardly_anything(shape):
    graph = step(shape, everything, torch.float32)
    done = rewrite(graph)
    check_graph(done.graph)
    assert bool(done.applied) == (0 not in shape)
    inputs = odd_inputs(graph, torch.Generator().manual_seed(1))
    for ours, eager in zip(run(done.graph, inputs), run(graph, inputs), strict=True):
        assert same_bits(ours, eager)


SMALL, WIDE, ONE = (12, 11), (12, 300), (12, 1)
INDEXED = {
    "greatest": (lambda x: x.max(1).values, [SMALL, WIDE, ONE]),
    "smallest, kept": (lambda x: x.min(0, keepdim=True).values, [SMALL, WIDE, ONE]),
    "of a permuted one": (lambda x: x.t().max(0).values, [SMALL, WIDE, ONE]),
    "of an expanded one": (lambda x: x.expand(3, *x.shape).max(0).values, [SMALL, ONE]),
    "some": (lambda x: x.topk(3, 1).values, [SMALL, WIDE]),
    "sorted": (lambda x: x.sort(0).values, [SMALL, WIDE, ONE]),
    "sorted, stable": (lambda x: torch.sort(x, stable=True, dim=0, descending=True).values, [SMALL, WIDE, ONE]),
    "median": (lambda x: x.median(1).values, [SMALL, ONE]),
    "greatest so far": (lambda x: x.cummax(1).values, [SMALL, WIDE]),
    "gathered": (lambda x: x.gather(1, x.detach().argsort(1)[:, :5].contiguous()), [SMALL, WIDE]),
    "looked up": (lambda x: F.embedding((x.detach() > 0).long() + 3, x), [SMALL]),
    "labels": (lambda x: F.cross_entropy(x, x.detach().flip(1).argmax(1), reduction="none"), [SMALL, WIDE, ONE]),
    "pooled, other layout": (lambda x: F.max_pool2d(x.t().view(1, 1, *x.t().shape), 2), [SMALL, WIDE]),
    "adaptive": (lambda x: F.adaptive_max_pool2d(x.view(1, 1, *x.shape), 3), [SMALL, WIDE]),
    "volumes": (lambda x: F.max_pool3d(x.view(1, 1, 2, 6, -1), 2), [WIDE]),
}


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name, (_, shapes) in INDEXED.items() for shape in shapes], ids=str)
def test_indices_of_all_kinds(name, shape):
    """NaN, infinities and extents of 1 included."""
    graph = step(shape, INDEXED[name][0], torch.float32)
    done = rewrite(graph, [NAMES["indices and labels in fewer bytes"]])
    check_graph(done.graph)
    assert done.applied
    assert all(each.place.now.nbytes <= each.place.storage.nbytes // 4 for each in done.applied)
    inputs = odd_inputs(graph, torch.Generator().manual_seed(1))
    for ours, eager in zip(run(done.graph, inputs), run(graph, inputs), strict=True):
        assert same_bits(ours, eager)


def test_labels_that_the_batch_holds_in_fewer_bytes_are_converted_again():
    model = nn.Linear(6, 5)
    batch = torch.zeros(300, 6), torch.zeros(300, dtype=torch.uint8)
    graph = training_graph(model, batch, lambda model, x, y: F.cross_entropy(model(x), y.long()))
    done = rewrite(graph, [NAMES["indices and labels in fewer bytes"]])
    check_graph(done.graph)
    (applied,) = done.applied
    assert (applied.place.storage.nbytes, applied.place.now) == (8 * 300, None)
    inputs = odd_inputs(graph, torch.Generator().manual_seed(1))
    for ours, eager in zip(run(done.graph, inputs), run(graph, inputs), strict=True):
        assert same_bits(ours, eager)


def test_rules_are_told_apart_by_their_names():
    assert len(NAMES) == len(RULES)
    assert all(dataclasses.is_dataclass(rule) and rule.name for rule in RULES)
