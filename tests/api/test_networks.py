"""Networks with all that real ones contain train as eager does, bit for bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bench import torchvision_shim
from tests.api.networks import convnet, cross_entropy, pictures, rows, sgd, squares, workload
from tests.training import check


def partly_frozen() -> nn.Module:
    """A batch norm in eval mode, and layers without gradient, inside a training network."""
    model = convnet()
    model[1].eval()
    model[0].requires_grad_(False)
    return model


class Tied(nn.Module):
    """Tied weights, a recurrent layer, a parameter used twice, one that is frozen and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        self.recurrent = nn.LSTM(8, 8, num_layers=2, batch_first=True, dropout=0.1, bidirectional=False)
        self.twice, self.frozen, self.unused = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(2, 2)
        self.out = nn.Linear(8, 20, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embedding(tokens))
        return self.out(self.twice(self.twice(hidden) + self.frozen(hidden)))


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), ignore_index=0)


class Statistics(nn.Module):
    """Buffers that the forward pass changes: in place, through views, and by putting another tensor there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("history", torch.zeros(3, 6))
        self.register_buffer("untouched", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.mean[1:].mul_(0.9).add_(y.mean(0)[1:], alpha=0.1)
            self.steps += 1
            self.history.copy_(self.history.roll(1, 0))
            self.history[0] = self.mean
        return (y - self.mean) * self.untouched + self.history.sum(0)


class Rebound(nn.Module):
    """A buffer that is replaced, not written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.mean


class Literals(nn.Module):
    """Tensors written in the program, and one that it closes over."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.weights = [torch.arange(6.0)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * torch.tensor(0.5) + torch.tensor([1, 2, 3, 4, 5, 6]) * torch.tensor(2)
        mask = torch.zeros(4, 6, dtype=torch.bool)
        mask[1:3, ::2] = True
        y = y.masked_fill(mask, float("-inf")).clamp(min=-5.0) * self.weights[0]
        return torch.where(torch.eye(4, 6).bool(), y, torch.full((), -0.0)) + torch.arange(4).unsqueeze(1) / 3


class Written(nn.Module):
    """Writes in place on what the step made: by index, mask and slice, through views and with `out=`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * 1.0
        y[torch.tensor([0, 2])] = x[:2]
        y.masked_fill_(x > 1, 0.25)
        first, second = y[:, :3], y[:, 3:]
        first.mul_(2)
        second[1:].add_(first[1:])
        y.t()[2:4].t().mul_(0.5)
        y[x < -1] = 0.5
        y.scatter_add_(1, torch.zeros(4, 1, dtype=torch.int64), x[:, :1])
        with torch.no_grad():
            noise = torch.empty(6, 4)
            torch.add(x.t().contiguous(), 1, out=noise)
            noise.view(2, 3, 4)[0].zero_()
        return y + noise.t()


class Square(torch.autograd.Function):
    """A backward pass of one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * grad * x


class Hooked(nn.Module):
    """Hooks of every kind: on modules forward and backward, on tensors, on parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.linear.register_forward_hook(lambda module, args, output: output * 2)
        self.linear.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.linear.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,) if inputs[0] is not None else None)
        self.linear.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x) @ torch.ones(6, 6) + self.linear(x * self.linear.bias)
        y.register_hook(lambda gradient: gradient * 3)
        return y


class Nested(nn.Module):
    """Takes and gives nested structures, with leaves that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, batch: dict[str, Any], *, scale: Tensor, mode: str) -> Tensor:
        x, (y, factor) = batch["x"], batch["rest"]
        return self.linear(x) * factor * scale + (y if mode == "plus" else -y)


NETWORKS = {
    "convolutions": workload(convnet, pictures, cross_entropy),
    "partly frozen": workload(partly_frozen, pictures, cross_entropy),
    "tied": workload(Tied, lambda: (torch.randint(0, 20, (3, 5)),), next_token),
    "GRU": workload(lambda: nn.GRU(6, 4, bidirectional=True), lambda: (torch.randn(3, 2, 6),), lambda m, x: m(x)[0].square().mean()),
    "statistics": workload(Statistics, rows, squares),
    "rebound buffer": workload(Rebound, rows, squares),
    "literals": workload(Literals, rows, squares),
    "writes": workload(Written, rows, squares),
    "own backward": workload(lambda: nn.Linear(6, 6), rows, lambda m, x: Square.apply(m(x)).mean()),
    "hooks": workload(Hooked, rows, squares),
    "spectral norm": workload(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), rows, squares),
    "weight norm": workload(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), rows, squares),
    "attention": workload(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), lambda: (torch.randn(2, 5, 8),), squares, sgd
    ),
    "transformer": workload(
        lambda: nn.Transformer(8, 2, 1, 1, 16), lambda: (torch.randn(3, 2, 8), torch.randn(4, 2, 8)), squares
    ),
    "multi-head": workload(lambda: nn.MultiheadAttention(8, 2), lambda: (torch.randn(3, 2, 8),), lambda m, x: m(x, x, x)[0].sum()),
    "embedding bag": workload(
        lambda: nn.EmbeddingBag(10, 4, mode="mean"), lambda: (torch.randint(0, 10, (4, 3)),), squares
    ),
    "instance norm": workload(lambda: nn.InstanceNorm2d(3, affine=True), lambda: (torch.randn(2, 3, 4, 4),), lambda m, x: (m(x) * x).sum()),
    "batch norm 1d": workload(
        lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=0.2), nn.CELU(inplace=True)), rows, squares
    ),
    "losses": workload(
        lambda: nn.Linear(6, 6), rows,
        lambda m, x: functional.smooth_l1_loss(m(x), x) + functional.kl_div(m(x).log_softmax(1), x.softmax(1)),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:reduction")  # of kl_div, for mathematicians
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize("name", NETWORKS)
def test_network(name):
    check(NETWORKS[name])


@pytest.mark.parametrize("name", ["convolutions", "partly frozen"])
def test_accumulation_over_micro_batches(name):
    check(NETWORKS[name], accumulate=2)


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def test_clipping_by_norm():
    check(NETWORKS["convolutions"], after_backward=clip)


def test_clipping_after_accumulation():
    check(NETWORKS["partly frozen"], after_backward=clip, accumulate=4)


def noisy(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.1)


def drop_some(model: nn.Module) -> None:
    for place, parameter in enumerate(model.parameters()):
        parameter.grad = None if place % 2 else parameter.grad * 0.5


@pytest.mark.parametrize("hook", [noisy, drop_some])
def test_gradients_changed_by_hand(hook):
    check(workload(lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), rows, squares), after_backward=hook)


def test_nested_batch_with_leaves_that_are_no_tensors():
    def batch():
        nested = {"x": torch.randn(4, 6), "rest": (torch.randn(4, 6), 2.5)}
        return {"batch": nested, "scale": torch.randn(()), "mode": "plus"}

    check(workload(Nested, batch, lambda model, **batch: model(**batch).square().mean()))


def test_loss_in_a_tuple_with_other_results():
    def loss(model, x):
        y = model(x)
        return y.square().mean(), {"y": y, "sign": y > 0, "note": "kept"}

    check(workload(lambda: nn.Linear(6, 6), rows, loss))


def test_loss_with_a_tensor_that_it_closes_over():
    weights = torch.rand(5)
    check(workload(convnet, pictures, lambda model, x, y: functional.cross_entropy(model(x), y, weight=weights)))


def test_a_gradient_within_the_loss():
    def penalised(model, x):
        x = x.clone().requires_grad_()
        y = model(x).tanh().sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return y + slope.square().sum()

    check(workload(lambda: nn.Sequential(nn.Linear(6, 6), nn.Softplus(), nn.Linear(6, 6)), rows, penalised))


def autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def autocast_within(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with autocast():
        scores = model(x)
    return functional.cross_entropy(scores.float(), y)


def test_autocast_within_the_loss():
    check(workload(convnet, pictures, autocast_within))
    check(workload(convnet, pictures, autocast_within), accumulate=2)


@pytest.mark.parametrize("around_optimize", [True, False])
def test_autocast_around_each_step(around_optimize):
    around = {"around_optimize": autocast} if around_optimize else {}
    check(workload(convnet, pictures, cross_entropy), around=autocast, **around)


def test_autocast_around_optimize_alone():
    check(workload(convnet, pictures, cross_entropy), around_optimize=autocast)


@pytest.mark.parametrize("checkpointed", [True, False])
def test_checkpointing_without_randomness(checkpointed):
    from torch.utils.checkpoint import checkpoint

    def loss(model, x):
        return (checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)).square().mean()

    check(workload(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)), rows, loss))


def tiny_gpt2() -> nn.Module:
    torchvision_shim.install()  # transformers imports torchvision
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=40, n_positions=16)).train()
    model.__dict__["loss_type"] = "ForCausalLM"
    return model


def tiny_bert() -> nn.Module:
    torchvision_shim.install()  # transformers imports torchvision
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=40)
    return BertForSequenceClassification(config).train()


def test_gpt2_returns_its_dataclass():
    def batch():
        tokens = torch.randint(0, 40, (2, 8))
        return {"input_ids": tokens, "labels": tokens, "use_cache": False}

    step = check(workload(tiny_gpt2, batch, lambda model, **batch: model(**batch)))
    with warnings.catch_warnings():
        out = step(**batch())
    assert out.loss is out["loss"]
    assert out.logits.shape == (2, 8, 40)


def test_bert_with_a_mask_and_the_loss_alone():
    def batch():
        return {"input_ids": torch.randint(0, 40, (2, 8)), "attention_mask": torch.ones(2, 8).tril(6), "labels": torch.randint(0, 2, (2,))}

    check(workload(tiny_bert, batch, lambda model, **batch: model(**batch).loss))
