"""Losses and modules that cannot be captured are refused: the message says what, where and what to do, and nothing is touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

import lowtide
from tests.refusals import HERE, WHERE, Net, refused, square
from tests.training import Settings as Plain
from tests.training import eager_step


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, x: model(x), r"must return a scalar; it returned a tensor of shape \(6, 4\).*\.mean\(\)"),
        (lambda model, x: None, r"must return a scalar tensor, .*returned a NoneType"),
        (lambda model, x: {"value": model(x).sum()}, "returned a dict"),
        (lambda model, x: model(x).sum().item, "returned a builtin"),
        (lambda model, x: model(x).sum().detach(), r"loss \(float32\) does not depend on any parameter"),
        (lambda model, x: x.sum(), "does not depend on any parameter"),
    ],
)
def test_losses_that_are_none(loss, message):
    refused(loss, message)


def test_sparse_gradients():
    tokens = torch.randint(0, 9, (6,))
    refused(lambda model, x: functional.embedding(tokens, model.embedding.weight, sparse=True).sum(), "sparse")


def test_a_tensor_that_should_be_a_parameter():
    outside = torch.ones(4, requires_grad=True)
    refused(lambda model, x: (model(x) * outside).sum(), rf"to a tensor of shape \(4,\).*, used at .*{HERE}, and is not a parameter")


def test_hooks_after_accumulation():
    model = Net()
    model.linear.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(lowtide.CaptureError, match=r"linear\.weight has a hook that runs after its gradient.*after_backward"):
        lowtide.optimize(model, torch.ones(6, 4), loss=square, optimizer=optim.SGD(model.parameters(), 0.1))


def test_a_conversion_that_changes_something():
    refused(
        lambda model, x: square(model.double(), x.double()), rf"weight of a \w+ is converted while the program runs, at {WHERE}.*before"
    )


def test_conversions_that_change_nothing():
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.GRU(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            self.inner = self.inner.to(x.dtype)
            return self.inner.to("cpu").float()(x)[0].sum()

    def run(optimized: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = Careful(), torch.randn(4, 3)
        optimizer = optim.SGD(model.parameters(), 0.1)
        step = (
            lowtide.optimize(model, x, loss=Careful.__call__, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
            if optimized
            else None
        )
        for _ in range(2):
            step(x) if step else eager_step(model, Careful.__call__, optimizer, (x,), {}, Plain())
        return [parameter.detach() for parameter in model.parameters()]

    for expected, found in zip(run(False), run(True), strict=True):
        assert torch.equal(expected, found)


def _appended(model: Net) -> None:
    model.grown.append(nn.Parameter(torch.ones(4)))


def _replaced(model: Net) -> None:
    model.linear.weight = nn.Parameter(torch.ones(4, 4))


def _made(model: Net) -> None:
    model.criterion = nn.MSELoss()


@pytest.mark.parametrize(
    ("change", "where"),
    [(_appended, "'grown'.*'0'"), (_replaced, "'linear'.*'weight'"), (_made, "'Net'.*'criterion'")],
)
def test_a_parameter_or_module_that_the_program_puts_into_the_model(change, where):
    """Though it has not looked before at what lay there."""
    model = Net()
    model.grown = nn.ParameterList()
    names, weight = [*model.state_dict()], model.linear.weight

    def loss(model: Net, x: Tensor) -> Tensor:
        change(model)
        return square(model, x)

    with pytest.raises(lowtide.CaptureError, match=f"module {where} in its forward.*call the model once before"):
        lowtide.optimize(model, torch.ones(6, 4), loss=loss, optimizer=optim.SGD(model.parameters(), 0.1))
    assert [*model.state_dict()] == names
    assert len(model.grown) == 0
    assert model.linear.weight is weight
