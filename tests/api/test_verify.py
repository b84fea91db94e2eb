"""`step.verify`: distances that are true, and a caller who finds everything as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from bench.in_values import in_values
from lowtide.api.verify import Deviation, Verification

X, Y = torch.randn(24, 8, generator=torch.Generator().manual_seed(0)), torch.randint(0, 500, (24,))


class Net(nn.Module):
    """A classifier of many classes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(dropout))
        self.head = nn.Linear(16, 500, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def step_of(model: nn.Module, **settings) -> lowtide.Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return lowtide.optimize(model, (X, Y), loss=loss, optimizer=optimizer, **in_values(workspaces=False, progress=False, **settings))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_an_exact_step_is_bit_equal_and_nothing_of_the_callers_changes(dropout):
    model = Net(dropout)
    step = step_of(model, memory="100%")
    step(X, Y)
    state, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = step.verify(X, Y)
    assert found.bit_equal
    assert found.within(0.0)
    assert "bit-equal" in str(found)
    assert len(found.gradients) == len(list(model.parameters()))
    assert not found.unknown
    assert all(0 < each.eagers_own < 1e-4 for each in found.gradients if each.name != "gradient of body.0.bias")  # batch norm takes it away
    assert torch.equal(drawn, torch.get_rng_state())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_a_step_in_parts_is_as_near_to_eager_as_eager_to_what_is_right():
    x, y = torch.randn(400, 8, generator=torch.Generator().manual_seed(1)), torch.randint(0, 500, (400,))
    model = Net()
    step = lowtide.optimize(
        model,
        (x, y),
        loss=loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        exact=False,
        memory="30%",
        planning=lowtide.Planning(workspaces=False, progress=False),
    )
    assert "run part by part" in str(step.plan)
    found = step.verify(x, y)
    assert found.within(4.0), str(found)  # to the last bit on some machines: along what it is split is by their times
    assert found.results[0].name == "loss"
    assert "gradient of head.weight" in {each.name for each in found.gradients}


def test_what_deviates_is_told():
    found = Verification((Deviation("loss", 1e-7, 2e-7),), (Deviation("gradient of body.0.weight", 3e-7, 1e-7),), (), "")
    assert not found.bit_equal
    assert found.within(4.0)
    assert not found.within(2.0)
    assert "gradient of body.0.weight" in str(found)


def test_the_distance_is_that_of_the_gradients():
    """Counted another way: the model in double precision, and autograd."""
    model = Net()
    step = step_of(model)
    found = {each.name: each for each in step.verify(X, Y).gradients}
    right = copy.deepcopy(model).double()
    loss(model, X, Y).backward()
    loss(right, X.double(), Y).backward()
    for name, parameter in model.named_parameters():
        expected = dict(right.named_parameters())[name].grad
        distance = (parameter.grad.double() - expected).norm() / expected.norm()
        assert found[f"gradient of {name}"].eagers_own == pytest.approx(distance.item(), rel=1e-3)


def test_inference_is_verified_too():
    model = Net().eval()
    step = lowtide.optimize(model, (X,), planning=lowtide.Planning(workspaces=False, progress=False))
    found = step.verify(X)
    assert found.bit_equal
    assert found.gradients == ()
    assert found.results[0].eagers_own > 0
