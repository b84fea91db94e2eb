"""The sets that matter are among the candidates on networks that nobody here wrote."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers

from bench import torchvision_shim
from lowtide.capture.program import TrainingProgram, capture_inference, capture_training
from lowtide.capture.trace import Given
from lowtide.ir.graph import Graph, Kind, Value
from lowtide.rewrite.losses import make_anew, sum_losses
from lowtide.split.dimensions import ComponentTable, DimensionGraph, cut_by
from lowtide.split.sets import SplitSet
from tests.fission_programs import evaluated, wrong_results
from tests.splits import candidates

torchvision_shim.install()

_BATCH, _TOKENS = 2, 16
_CPU = torch.device("cpu")
_SMALL = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LANGUAGE = {
    "gpt2": lambda dropout: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=4, attn_pdrop=dropout)
    ),
    "bert": lambda dropout: transformers.BertForMaskedLM(
        transformers.BertConfig(**_SMALL, max_position_embeddings=64, attention_probs_dropout_prob=dropout)
    ),
    "llama": lambda _: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL, num_key_value_heads=2, use_cache=False)),
}


def timm() -> Any:
    """Imported by those who need it: with its classes of modules there, each capture of any test takes longer."""
    return pytest.importorskip("timm")


@functools.cache
def trained(name: str, length: int = _TOKENS, dropout: float = 0.1) -> Graph:
    """A step of AdamW on a language model, with its mean loss as a sum, and nothing that waits for the looks of another tensor."""
    model = LANGUAGE[name](dropout)
    tokens = torch.zeros(_BATCH, length, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    program = TrainingProgram(model, lambda m, x, y: m(input_ids=x, labels=y).loss, optimizer, None, 1, None)
    captured = capture_training(program, Given((tokens, tokens), {}, _CPU))[-1].graph
    return make_anew(sum_losses(captured).graph).graph


@functools.cache
def regions(graph: Graph) -> list[SplitSet]:
    return [each.region for each in candidates(graph)]


def count(graph: Graph, region: SplitSet, *parts: str) -> int:
    """How many nodes have a name with one of these parts."""
    return sum(any(part in graph.nodes[place].op for part in parts) for place in region.axes)


def cut_at(graph: Graph, region: SplitSet, part: str) -> set[int]:
    """The dimensions along which nodes of such a name are cut, by their first argument."""
    nodes = [(graph.nodes[place], axis) for place, axis in region.axes.items() if part in graph.nodes[place].op]
    return {dim for node, axis in nodes for value, dim in cut_by(node, axis) if value is node.args[0]}


def of_module(graph: Graph, region: SplitSet, part: str) -> list[str]:
    """The operators of a region that modules of such a name run."""
    nodes = (graph.nodes[place] for place in region.axes)
    return [node.op for node in nodes if node.source is not None and part in node.source.module]


PRODUCTS = ("aten.mm.", "aten.bmm.", "aten.addmm.", "matmul")


@pytest.mark.parametrize("name", LANGUAGE)
def test_loss_and_logits_are_cut_between_tokens(name):
    """Logits, their loss and its gradients in parts of any tokens, with the gradient of the table accumulated."""
    graph = trained(name)
    found = [each for each in regions(graph) if count(graph, each, "nll_loss_forward") and count(graph, each, "nll_loss_backward")]
    finest = max(found, key=lambda each: each.units)
    assert finest.units == _BATCH * _TOKENS
    assert count(graph, finest, *PRODUCTS) >= 3
    assert {value.shape for value in finest.accumulated} >= {(), (256, 32)}
    assert not any(value.shape[-1:] == (256,) and len(value.shape) > 1 for value in (*finest.sliced, *finest.written)), "logits stay within"


@pytest.mark.parametrize("name", LANGUAGE)
def test_forward_and_backward_of_a_segment_are_cut_over_the_batch(name):
    """What micro-batches by hand do, from some layer on."""
    graph = trained(name)
    segments = [each for each in regions(graph) if each.units == _BATCH and count(graph, each, "nll_loss_backward")]
    largest = max(segments, key=lambda each: len(each.axes))
    kinds = {value.storage.kind for place in largest.axes for value in graph.nodes[place].results}
    assert {Kind.ACTIVATION, Kind.GRADIENT} <= kinds
    assert count(graph, largest, *PRODUCTS) >= 12
    assert len(largest.accumulated) >= 4


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_attention_is_cut_over_queries(name):
    """Scores, their softmax, dropout with a mask that is drawn whole, and what is gathered by them; keys and values stay whole."""
    graph = trained(name, length=48)
    found = [each for each in regions(graph) if cut_at(graph, each, "softmax.") == {2}]
    assert any(count(graph, each, *PRODUCTS) >= 2 and count(graph, each, "softmax.") == 1 for each in found)


@pytest.mark.parametrize("name", LANGUAGE)
def test_fused_attention_is_cut_over_heads(name):
    graph = trained(name, dropout=0.0)
    assert any(cut_at(graph, each, "_scaled_dot_product_flash_attention_for_cpu.") == {1} for each in regions(graph))


@pytest.mark.parametrize(("name", "module"), [("gpt2", "mlp"), ("bert", "intermediate"), ("llama", "mlp")])
def test_feed_forward_layers_are_cut_over_tokens(name, module):
    """Within one layer: both products, and what is between them."""
    graph = trained(name)
    found = [each for each in regions(graph) if 2 <= count(graph, each, *PRODUCTS) <= 3 and of_module(graph, each, module)]
    assert any(cut_at(graph, each, "mm.") <= {0, 1} and each.units in (_BATCH, _BATCH * _TOKENS) for each in found)


@pytest.mark.parametrize("name", LANGUAGE)
def test_an_update_is_cut_over_elements(name):
    graph = trained(name, length=2)
    found = [each for each in regions(graph) if count(graph, each, "addcdiv_")]
    assert found
    for each in found:
        after = [after for place in each.axes for _, after in graph.nodes[place].writes]
        assert set(after) <= each.written.keys()


def test_blocks_of_convolutions_are_cut_over_the_batch():
    model = timm().create_model("resnet18").eval()
    graph = capture_inference(model, Given((torch.zeros(4, 3, 64, 64),), {}, _CPU)).graph
    counts = {count(graph, each, "convolution") for each in regions(graph) if each.units == 4}
    assert 20 in counts, "the whole network"
    assert counts & set(range(1, 6)), "what stands at the peak"


def test_convolutions_and_their_gradients_are_cut_over_the_batch():
    """Norms over groups of channels; statistics over the batch close it."""
    model = timm().create_model("resnet18", norm_layer=timm().layers.GroupNorm)
    images, labels = torch.zeros(4, 3, 64, 64), torch.zeros(4, dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    program = TrainingProgram(model, lambda m, x, y: torch.nn.functional.cross_entropy(m(x), y), optimizer, None, 1, None)
    graph = make_anew(sum_losses(capture_training(program, Given((images, labels), {}, _CPU))[-1].graph).graph).graph
    found = [each for each in regions(graph) if each.units == 4]
    both = [(count(graph, each, "convolution.default"), count(graph, each, "convolution_backward")) for each in found]
    assert any(forward > 4 and backward > 4 for forward, backward in both)


@pytest.mark.parametrize("name", LANGUAGE)
def test_nothing_random_is_in_a_set(name):
    graph = trained(name)
    assert not any(count(graph, each, "bernoulli", "dropout", "rand") for each in regions(graph))


@pytest.mark.parametrize("name", LANGUAGE)
def test_the_dimensions_of_a_step_are_named(name):
    names = {line.name.split()[0] for line in ComponentTable.of(DimensionGraph.of(trained(name))).lines}
    assert {"batch", "tokens", "heads", "features"} <= names


def _inputs(graph: Graph) -> dict[Value, Any]:
    """Random tensors for what a graph is given; whole numbers are 0 or 1, as there are two types of tokens."""
    found: dict[Value, Any] = {}
    for value in graph.inputs:
        if value.dtype == "scalar":
            found[value] = 0.1
        elif value.dtype == "int64":
            found[value] = torch.randint(0, 2, value.shape)
        elif value.storage not in {other.storage for other in found}:
            found[value] = torch.rand(value.shape) / 4 + 0.1
    return found


@pytest.mark.parametrize("name", LANGUAGE)
def test_parts_of_every_candidate_make_the_whole(name):
    """All that a step computes, node by node on random numbers; then each candidate once more in parts of random sizes."""
    torch.manual_seed(0)
    graph = trained(name)
    values = evaluated(graph, _inputs(graph))
    for number, region in enumerate(regions(graph)):
        assert wrong_results(values, graph, region, number) == []
