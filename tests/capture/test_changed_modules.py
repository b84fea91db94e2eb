"""A program that changes what it has read of its modules would go another way in the next step: it is refused, and nothing else is."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim

import lowtide
from tests.refusals import Net, refused
from tests.training import check


def switching(model: Net, x: Tensor) -> Tensor:
    """A text that chooses the way, as BigBird's kind of attention does."""
    x = x if model.mode == "sparse" else x * 2
    model.mode = "full"
    return model(x).sum()


def remembering(model: Net, x: Tensor) -> Tensor:
    x = x if model.length is None else x[: model.length]
    model.length = 3
    return model(x).sum()


def making_once(model: Net, x: Tensor) -> Tensor:
    x = x * 2 if hasattr(model, "made") else x
    model.made = "now"
    return model(x).sum()


def exchanging(model: Net, x: Tensor) -> Tensor:
    y = model(x)
    model.linear = nn.Identity()
    return y.sum()


def training_another(model: Net, x: Tensor) -> Tensor:
    y = model(x)
    model.embedding.weight = nn.Parameter(model.embedding.weight * 2)
    return y.sum()


def widening(model: Net, x: Tensor) -> Tensor:
    x = x * model.sizes[0]
    model.sizes = (*model.sizes, 2)
    return model(x).sum()


@pytest.mark.parametrize(
    ("loss", "module", "name"),
    [
        (exchanging, "Net", "linear"),
        (training_another, "embedding", "weight"),
        (widening, "Net", "sizes"),
    ],
)
def test_a_module_that_changes_what_it_has_read(loss, module, name):
    refused(loss, f"module '{module}' changes its attribute '{name}' in its forward.*buffer.*call the model once before")


class Settled(nn.Module):
    """Writes before it reads, makes what it keeps of nothing that changes, and puts down what equals what was there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.sizes, self.width, self.mode = nn.Linear(4, 4), (1, 2), None, "first"

    @functools.cached_property
    def scale(self) -> float:
        return 4**-0.5

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "_capturing_hooks_installed", False):  # as transformers does
            self._capturing_hooks_installed = True
        self.width, self.mode = x.shape[-1], "later"
        self.sizes = (*self.sizes[:1], self.sizes[1])
        return self.linear(x) * self.scale * (self.width if self.mode == "later" else 1.0)


def test_changes_that_no_later_step_finds_are_eagers():
    def make():
        torch.manual_seed(0)
        model = Settled()
        return model, (torch.randn(6, 4),), lambda model, x: model(x).square().sum(), optim.SGD(model.parameters(), lr=0.1)

    check(make)


@pytest.mark.parametrize("loss", [switching, remembering, making_once])
def test_the_way_that_a_first_step_alone_goes(loss):
    def make():
        torch.manual_seed(0)
        model = Net()
        return model, (torch.randn(6, 4),), loss, optim.SGD(model.parameters(), lr=0.1)

    check(make)


def test_what_only_the_first_call_changes_is_captured_after_it():
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(6, 4)
    with torch.no_grad():
        switching(model, x)
        expected = switching(model, x)
    step = lowtide.optimize(_Called(model, switching), (x,), planning=lowtide.Planning(workspaces=False))
    assert torch.equal(step(x), expected)


class _Called(nn.Module):
    def __init__(self, model: Net, function: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.model, x)
