"""Draws that are repeated under a state that was put back, as checkpointing repeats a dropout: the same numbers, as in eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lowtide
from tests.training import Settings, eager_step

Loss = Callable[[nn.Module, Tensor], Tensor]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.4), nn.ReLU(), nn.Linear(6, 6), nn.Dropout(0.2), nn.Linear(6, 2))


def in_a_checkpoint(model: Any, x: Tensor, **options: Any) -> Tensor:
    hidden = model[0](functional.dropout(x, 0.1))
    return functional.dropout(checkpoint(model[1:], hidden, **options), 0.3).square().mean()


class Cached(torch.autograd.Function):
    """Embeds without gradients, and again in the backward pass, as cached losses do."""

    @staticmethod
    def forward(ctx: Any, model: nn.Module, x: Tensor, needed: Tensor) -> Tensor:
        ctx.model, ctx.x, ctx.state = model, x, torch.get_rng_state()
        with torch.no_grad():
            return model(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            (ctx.model(ctx.x) * gradients[0]).sum().backward()
        return None, None, None


def cached(model: Any, x: Tensor) -> Tensor:
    needed = torch.ones((), requires_grad=True)
    return sum((Cached.apply(model, part, needed).square().mean() for part in x.split(2)), start=torch.zeros(()))


def of_probabilities(model: Any, x: Tensor) -> Tensor:
    """A draw that follows from what is computed again."""
    return checkpoint(lambda x: model[0](x * torch.bernoulli(torch.sigmoid(x.cumsum(0)))), x, use_reentrant=False).square().mean()


def steps(loss: Loss, optimized: bool) -> list[Any]:
    model, x = model_of(), torch.randn(4, 4)
    optimizer = optim.SGD(model.parameters(), 0.1)
    step = lowtide.optimize(model, x, loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False)) if optimized else None
    torch.manual_seed(1)
    losses = [step(x) if step else eager_step(model, loss, optimizer, (x,), {}, Settings()) for _ in range(2)]
    return [*model.parameters(), torch.get_rng_state(), *(torch.as_tensor(each).detach() for each in losses)]


CASES = {
    "checkpoint": partial(in_a_checkpoint, use_reentrant=False),
    "reentrant": partial(in_a_checkpoint, use_reentrant=True),
    "cached": cached,
    "of probabilities": of_probabilities,
}


@pytest.mark.parametrize("loss", CASES.values(), ids=CASES)
def test_a_repeated_draw_gives_what_it_gave(loss: Loss) -> None:
    for mine, eagers in zip(steps(loss, True), steps(loss, False), strict=True):
        assert torch.equal(mine, eagers)


def other_kind(model: Any, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    first = torch.rand(4)
    torch.set_rng_state(state)
    return (model[0](x * first) * torch.randn(6)).sum()


def other_size(model: Any, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    first = torch.rand(4)
    torch.set_rng_state(state)
    return (model[0](x * first) * torch.rand(6)).sum()


def other_inputs(model: Any, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    first = torch.bernoulli(torch.sigmoid(x))
    torch.set_rng_state(state)
    return model[0](first * torch.bernoulli(torch.sigmoid(x * 2))).sum()


def left_there(model: Any, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    drawn = torch.rand(4)
    torch.set_rng_state(state)
    return model[0](x * drawn).sum()


def decides(model: Any, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    drawn = torch.rand(())
    torch.set_rng_state(state)
    return model[0](x * drawn).sum() * (2.0 if torch.rand(()) < 0.5 else 1.0)


REFUSED = {
    "another kind": (other_kind, r"aten\.randn.* at \S*\.py:\d+ draws .* put back .* not what aten\.rand\."),
    "another size": (other_size, "put back a state of torch's generator, and not what"),
    "other inputs": (other_inputs, "put back a state of torch's generator, and not what"),
    "a state that is left": (left_there, "seeds torch's generator"),
    "a decision": (decides, "depends on data.*a random draw"),
    "no state": (partial(in_a_checkpoint, use_reentrant=False, preserve_rng_state=False), "preserve_rng_state=False.*set the dropout to 0"),
}


@pytest.mark.parametrize(("loss", "message"), REFUSED.values(), ids=REFUSED)
def test_draws_that_would_be_others(loss: Loss, message: str) -> None:
    model = model_of()
    with pytest.raises(lowtide.CaptureError, match=message):
        lowtide.optimize(
            model, torch.randn(4, 4), loss=loss, optimizer=optim.SGD(model.parameters(), 0.1), planning=lowtide.Planning(workspaces=False)
        )
