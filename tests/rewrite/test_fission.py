"""Splitting: a set of nodes in parts computes what it does as a whole; what cannot be split is refused with its reason."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F

from lowtide.errors import CheckError
from lowtide.ir.bodies import Loop, is_loop
from lowtide.ir.graph import Graph
from lowtide.ir.operators.axes import cut_by, is_innermost
from lowtide.rewrite.base import replace_nodes
from lowtide.rewrite.losses import add_into_sums, make_anew, sum_losses
from lowtide.split.dimensions import DimensionGraph
from lowtide.split.parts import Split
from tests.loops import Captured, captured, checked, made, nodes_of, planned, set_around
from tests.splits import along, split

SGD, ADAMW = partial(optim.SGD, lr=0.1), partial(optim.AdamW, lr=0.1, foreach=False)


def tokens(count: int = 50, width: int = 16, words: int = 40, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Features, labels of which some do not count, and a table."""
    torch.manual_seed(0)
    labels = torch.randint(0, words, (count,))
    labels[3] = -100
    return torch.randn(count, width, dtype=dtype), labels, torch.randn(words, width, dtype=dtype)


def classified(x: torch.Tensor, labels: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(torch.tanh(x) @ table.t(), labels)


def same(program: Captured, graph: Graph) -> None:
    """A graph computes what the captured one does: to some digits of double precision, and exactly where nothing is rounded."""
    for got, expected in zip(program.run(graph), program.run(), strict=True):
        assert got.stride() == expected.stride()
        if got.is_floating_point():
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
        else:
            assert torch.equal(got, expected)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 50, 1000])
def test_logits_loss_and_their_backward_over_tokens(parts):
    x, labels, table = tokens()
    program = captured(classified, (x, labels), (table,), SGD)
    graph = sum_losses(make_anew(program.graph).graph).graph
    logits = nodes_of(graph, "mm", "_log_softmax", "nll_loss_forward", "nll_loss_backward", "_log_softmax_backward_data")
    logits += [node for node in nodes_of(graph, "t") if node.inputs[0].storage.kind.value == "gradient"]
    logits.sort(key=graph.nodes.index)
    done = checked(split(graph, along(logits, made(graph, "mm"), 0), parts).graph)
    (loop,) = (Loop.of(node) for node in done.nodes if is_loop(node))
    assert loop.extent == 50
    assert sum(size * count for size, count in loop.sizes) == 50
    assert "addmm_" in [node.op.split(".")[1] for node in loop.body.nodes], "the gradient is added to in place"
    same(program, done)


def test_an_update_over_elements_is_the_same_to_the_last_bit():
    x, labels, table = tokens(dtype=torch.float32)
    program = captured(classified, (x, labels), (table,), ADAMW)
    graph = program.graph
    update = [node for node in graph.nodes if node.writes and node.writes[0][0].shape == table.shape]
    update += [node for node in nodes_of(graph, "sqrt", "div", "add", "mul", "addcdiv") if node.results[0].shape == table.shape]
    update = sorted({*update}, key=graph.nodes.index)
    update = [node for node in update if node.op.split(".")[1] != "mm" and node.results[0].storage.kind.value != "activation"]
    done = checked(split(graph, along(update, update[-1].writes[0][0], 0), 6).graph)
    (node,) = (node for node in done.nodes if is_loop(node))
    assert max(after.version - before.version for before, after in node.writes) > 1, "AdamW writes its second moment twice"
    for got, expected in zip(program.run(done), program.run(), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (lambda x: x.sum(), False), (lambda x: x.mean(0), False), (lambda x: x.mean(), False), (lambda x: x.amax(0), True),
        (lambda x: x.amin(), True), (lambda x: (x > 1).any(0), True), (lambda x: (x > -9).all(), True), (lambda x: x.prod(), False),
        (lambda x: (x > 0).sum(), True), (lambda x: x.round().long().amax(0), True), (lambda x: x.round().int().amin(0), True),
        (lambda x: (x * 2, x.sum(0)), False), (lambda x: x.t().contiguous() + 1, True), (lambda x: F.softmax(x, -1), True),
    ],
)  # fmt: skip
def test_parts_are_put_together(function, exact):
    torch.manual_seed(0)
    program = captured(lambda x: function(torch.sin(x) * 3), (torch.randn(10, 7, dtype=torch.float64),))
    graph = program.graph
    done = checked(split(graph, along(graph.nodes, graph.inputs[0], 0), 4).graph)
    same(program, done)
    if exact:
        assert all(torch.equal(got, expected) for got, expected in zip(program.run(done), program.run(), strict=True))


def attended(x: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """Attention of four heads."""
    batch, length, width = x.shape
    q, k, v = (each.view(batch, length, 4, width // 4).transpose(1, 2) for each in (x @ wide).split(width, 2))
    scores = torch.softmax(q @ k.transpose(-1, -2) / 2, -1)
    return (scores @ v).transpose(1, 2).reshape(batch, length, width)


@pytest.mark.parametrize("parts", [2, 4, 5])
def test_a_layer_of_transformers_over_the_batch_that_lies_within_its_tokens(parts):
    """`nn.MultiheadAttention` merges tokens and batch, in this order: a part's rows are apart, and yet it runs forward and backward."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    names, weights = zip(*((name, each.detach().clone()) for name, each in layer.named_parameters()), strict=True)
    x = torch.randn(5, 3, 8, dtype=torch.float64)

    def loss(x, *given):
        return torch.func.functional_call(layer, dict(zip(names, given, strict=True)), (x,)).pow(2).sum()

    program = captured(loss, (x,), weights, SGD)
    graph = make_anew(program.graph).graph
    merged = next(node for node in nodes_of(graph, "clone") if node.outputs[0].shape == (3, 5, 8))
    wanted = set_around(graph, merged.outputs[0], 1)
    assert wanted is not None
    assert sum(node.op.startswith("aten.mm") or node.op.startswith("aten.addmm") for node in wanted.nodes) >= 10
    done = checked(split(graph, wanted, parts).graph)
    same(program, done)


def test_what_lies_merged_outside_is_not_cut_within():
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    program = captured(lambda x: torch.tanh(x.view(15, 4)).view(3, 5, 4) * 2, (x,))
    (wide,) = nodes_of(program.graph, "tanh")
    axes = {node: axis for node, each in zip(program.graph.nodes, DimensionGraph.of(program.graph).axes, strict=True) for axis in each
            if axis.extent == 5 and any(is_innermost(dim) for _, dim in cut_by(node, axis))}  # fmt: skip
    assert wide in axes
    with pytest.raises(CheckError, match="dense"):
        split(program.graph, Split(axes), 2)
    with pytest.raises(CheckError, match="merged of is apart"):
        split(program.graph, Split({wide: axes[wide]}), 2)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_attention_over_batch_heads_and_queries(dim):
    torch.manual_seed(0)
    x, wide = torch.randn(3, 6, 8, dtype=torch.float64), torch.randn(8, 24, dtype=torch.float64)
    program = captured(attended, (x, wide))
    first, last = (program.graph.nodes.index(node) for node in nodes_of(program.graph, "bmm"))
    wanted = set_around(program.graph, made(program.graph, "_softmax"), dim, range(first, last + 1))
    assert wanted is not None
    same(program, checked(split(program.graph, wanted, 2).graph))


def test_a_loop_within_a_loop():
    x, _, table = tokens()
    program = captured(lambda x, table: (torch.tanh(x * 2) @ table.t()).relu(), (x, table))
    graph = program.graph
    outer = split(graph, along(graph.nodes, graph.inputs[0], 0), 3).graph
    (node,) = (node for node in outer.nodes if is_loop(node))
    wide = [each for each in node.body.nodes if each.op.split(".")[1] in ("mul", "tanh")]
    inner = along(wide, wide[0].outputs[0], 1)
    body = split(node.body, replace(inner, part_name="column"), 4).graph
    done = checked(replace_nodes(outer, {node: (replace(node, body=body),)}).graph)
    same(program, done)


def test_gradients_of_looked_up_rows_are_added_where_the_others_are():
    torch.manual_seed(0)
    table, words = torch.randn(30, 8, dtype=torch.float64), torch.randint(0, 30, (2, 6))
    program = captured(lambda words, table: F.cross_entropy(F.embedding(words, table).flatten(0, 1) @ table.t(), words.flatten()),
                       (words,), (table,), SGD)  # fmt: skip
    done = add_into_sums(program.graph)
    assert done.forward
    assert not nodes_of(done.graph, "embedding_dense_backward")
    same(program, done.graph)
    assert not add_into_sums(captured(classified, tokens()[:2], (tokens()[2],), SGD).graph).forward


@pytest.mark.parametrize("parts", [2, 7, 40])
def test_a_table_that_serves_twice_is_updated_row_by_row(parts):
    """Neither of its two gradients, nor their sum, is ever whole: every part adds up and uses those of some words."""
    words, table = torch.tensor([[1, 2, 2, 5], [5, 39, 0, 2]]), tokens()[2]
    program = captured(lambda words, table: F.cross_entropy(F.embedding(words, table).flatten(0, 1) @ table.t(), words.flatten()),
                       (words,), (table,), SGD)  # fmt: skip
    graph = add_into_sums(program.graph).graph
    update = [node for node in graph.nodes if node.writes and node.writes[0][0].shape == table.shape]
    total = nodes_of(graph, "add_rows")
    of_scores = [node for node in graph.nodes for each in total if node.outputs and node.outputs[0] is each.args[0]]
    done = checked(split(graph, along([*of_scores, *total, *update], update[-1].writes[0][0], 0), parts).graph)
    assert not [value for node in done.nodes for value in node.outputs if value is not None and value.shape == table.shape]
    same(program, done)


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss, partial(F.mse_loss, reduction="sum")])
def test_mean_losses_become_sums(loss):
    torch.manual_seed(0)
    x, y, w = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    program = captured(lambda x, y, w: loss(x @ w, y), (x, y), (w,), SGD)
    done = sum_losses(program.graph)
    assert bool(done.forward) == (not isinstance(loss, partial))
    same(program, done.graph)


def test_a_loss_whose_labels_all_do_not_count_stays_what_it_was():
    x, labels, table = tokens()
    program = captured(classified, (x, torch.full_like(labels, -100)), (table,), SGD)
    done = program.run(sum_losses(make_anew(program.graph).graph).graph)
    assert all(torch.equal(got.isnan(), expected.isnan()) for got, expected in zip(done, program.run(), strict=True))


def refused(program: Captured, reason: str, nodes, value, dim: int = 0) -> None:
    with pytest.raises(CheckError, match=reason):
        split(program.graph, along(nodes, value, dim), 2)


def test_what_cannot_be_split_is_refused():
    x = torch.randn(6, 4)
    program = captured(lambda x: F.dropout(x * 2, 0.5) + 1, (x,))
    refused(program, "to run through it", program.graph.nodes, program.graph.inputs[0])
    program = captured(lambda x: (x * 2).sum(0) + x, (x,))
    refused(program, "nobody in the set reads|all to read|run through", program.graph.nodes, program.graph.inputs[0])
    program = captured(lambda x: torch.sin(x) * torch.sin(x).cumsum(0), (x,))
    ends = [node for node in program.graph.nodes if "cumsum" not in node.op]
    refused(program, "convex", ends, program.graph.inputs[0])
    program = captured(lambda x, y: (torch.sin(x), torch.cos(y)), (x, x + 1))
    with pytest.raises(CheckError, match="run through it"):
        along(program.graph.nodes, program.graph.inputs[0], 0)
    program = captured(lambda x, y: torch.sin(x) @ torch.cos(y), (x, torch.randn(4, 4)))
    refused(program, "run through it", program.graph.nodes, program.graph.inputs[0])


def test_what_is_written_must_be_read_as_it_is_written():
    """A part may not read what other parts write: here each would read all of the parameter, some of it updated."""
    x, w = torch.randn(5, 4), torch.randn(4, 4)
    program = captured(lambda x, w: (x @ w @ w.t()).sum(), (x,), (w,), SGD)
    graph = program.graph
    update = next(node for node in graph.nodes if node.writes)
    readers = [node for node in graph.nodes if any(value.storage is update.writes[0][0].storage for value in node.inputs)]
    gradient = update.args[1]
    region_ = set_around(graph, gradient, 0)
    assert region_ is not None
    nodes = sorted({*region_.nodes, *readers}, key=graph.nodes.index)
    with pytest.raises(CheckError):
        split(graph, along(nodes, gradient, 0), 2)


OPERATIONS = {
    "sin": lambda x, w: torch.sin(x), "mul": lambda x, w: x * 1.5, "norm": lambda x, w: F.layer_norm(x, x.shape[-1:]),
    "linear": lambda x, w: x @ w, "residual": lambda x, w: x + torch.tanh(x @ w), "softmax": lambda x, w: torch.softmax(x, -1),
    "mix": lambda x, w: x.transpose(1, 2).contiguous().transpose(1, 2) + 1, "heads": lambda x, w: attended(x, torch.cat([w, w, w], 1)),
    "flat": lambda x, w: (x.flatten(0, 1) @ w).view(x.shape), "relu": lambda x, w: F.relu(x), "center": lambda x, w: x - x.mean(1, True),
    "square": lambda x, w: x * x.roll(1, 0), "most": lambda x, w: x * (x > 0),
    "turned": lambda x, w: (x.permute(1, 0, 2) * 2).permute(1, 0, 2),
}  # fmt: skip


@settings(max_examples=10)
@given(
    st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=5), st.integers(0, 10**6), st.integers(2, 5), st.booleans(),
    st.sampled_from([2, 8, 100]),
)  # fmt: skip
def test_random_programs_with_random_splits_compute_the_same(names, pick, parts, trains, reach):
    """Forward and backward pass and update of random networks, around a random tensor, along a random dimension, as far as it reaches."""
    torch.manual_seed(0)
    x, w = torch.randn(4, 6, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64) / 3

    def network(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for name in names:
            x = OPERATIONS[name](x, w)
        return (x @ w).square().mean() if trains else x

    program = captured(network, (x,), (w,), SGD if trains else None)
    makers = {value: place for place, node in enumerate(program.graph.nodes) for value in node.results if value.shape}
    value = sorted(makers, key=lambda value: value.name)[pick % len(makers)]
    places = range(max(0, makers[value] - reach), min(len(program.graph.nodes), makers[value] + reach + 1))
    wanted = set_around(program.graph, value, pick % len(value.shape), places)
    assume(wanted is not None)
    try:
        done = split(program.graph, wanted, parts).graph
    except CheckError:
        assume(False)
    same(program, checked(done))


def test_what_only_looks_like_another_tensor_is_made_of_numbers():
    x = torch.randn(4, 6)
    program = captured(lambda x: (torch.zeros_like(x), torch.ones_like(x.t()), F.dropout(x, 0.5) * 0), (x,))
    done = make_anew(program.graph)
    assert done.forward
    assert not nodes_of(done.graph, "zeros_like", "empty_like")
    assert all(torch.equal(got, expected) for got, expected in zip(program.run(done.graph), program.run(), strict=True))
    assert [each.stride() for each in program.run(done.graph)] == [each.stride() for each in program.run()]


def test_kernels_that_look_at_no_strides_are_given_no_slices_with_gaps():
    """The gradient of a layer norm reads mean and deviation as if they lay dense, and is silently wrong where they do not."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 6, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    program = captured(lambda x, w: F.layer_norm(x @ w, (8,)).tanh().square().mean(), (x,), (w,), SGD)
    graph = program.graph
    backward = made(graph, "native_layer_norm_backward")
    wanted = along([node for node in graph.nodes if backward in node.outputs], backward, 1)
    done = checked(split(graph, wanted, 2).graph)
    assert "clone" in [node.op.split(".")[1] for node in next(node for node in done.nodes if is_loop(node)).body.nodes]
    same(program, done)


def mixed(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ w, 1) @ v


def mixed_and_kept(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = x @ w
    mixed = torch.softmax(scores, 1) @ v
    return mixed, scores * mixed


def read_late(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = x @ w
    return torch.softmax(scores, 1) @ v, scores @ v[:, :3]


@pytest.mark.parametrize(("function", "ops", "taken"), [
    (mixed, ("_softmax", "mm"), True),
    (mixed_and_kept, ("_softmax", "mm", "mul"), True),  # by a node that reads it while it writes, element by element
    (read_late, ("_softmax", "mm"), False),  # the other product reads it once the first has written
])  # fmt: skip
@pytest.mark.parametrize("parts", [3, 10])
def test_a_result_may_lie_where_the_parts_it_is_made_of_lay(function, ops, taken, parts):
    torch.manual_seed(0)
    program = captured(lambda x, w, v: function(x, w, v), (torch.randn(10, 6), torch.randn(6, 8), torch.randn(8, 8)))
    graph = program.graph
    nodes = [node for node in nodes_of(graph, *ops) if node is not nodes_of(graph, "mm")[0]]
    done = checked(split(graph, along(nodes, made(graph, "_softmax"), 0), parts).graph)
    (loop,) = (node for node in done.nodes if is_loop(node))
    assert [value.name for value, _ in loop.inplace] == ([made(graph, "mm").name] if taken else [])
    reuses = planned(program.plan, done).reuses
    assert (reuses[done.nodes.index(loop)] >= 0) == taken
    for got, expected in zip(program.run(done), program.run(), strict=True):
        torch.testing.assert_close(got, expected)
