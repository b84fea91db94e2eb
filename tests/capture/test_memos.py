"""Tables that a forward fills: what follows from the model alone is computed again, all else is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowtide
from tests.training import differences

Kept = Callable[["Biased", torch.Tensor], torch.Tensor]


class Biased(nn.Module):
    """Keeps in a table what `keeps` makes, as models keep their position biases."""

    def __init__(self, keeps: Kept) -> None:
        super().__init__()
        self.linear, self.biases, self.keeps = nn.Linear(8, 8), nn.Parameter(torch.randn(2, 5)), keeps
        self.register_buffer("places", torch.randint(0, 5, (4, 4)))
        self.table: dict[str, torch.Tensor] = {"before": torch.ones(4)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):  # the second time it is there
            if "bias" not in self.table:
                self.table["bias"] = self.keeps(self, x)
            x = self.linear(x + self.table["bias"].sum() * self.table["before"].mean())
        return x


def of_parameters(model: Biased, x: torch.Tensor) -> torch.Tensor:
    return model.biases[:, model.places]


def of_batch(model: Biased, x: torch.Tensor) -> torch.Tensor:
    return model.biases[:, model.places] * x.mean()


def drawn(model: Biased, x: torch.Tensor) -> torch.Tensor:
    return model.biases + torch.rand(2, 5)


def written(model: Biased, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.places.add_(1) * 1.0


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 8)


def test_what_follows_from_parameters_is_computed_at_each_call(x: torch.Tensor) -> None:
    model = Biased(of_parameters).eval()
    fn = lowtide.optimize(model, (x,))
    for _ in range(2):
        mine = fn(x)
        assert list(model.table) == ["before"]
        with torch.no_grad():
            assert torch.equal(mine, model(x))
        del model.table["bias"]
        with torch.no_grad():
            model.biases.mul_(2.0)


@pytest.mark.parametrize("gradients", [False, True])
def test_what_a_call_before_has_kept_is_a_constant(x: torch.Tensor, gradients: bool) -> None:
    model = Biased(of_parameters).eval()
    with torch.set_grad_enabled(gradients):
        model(x)
    assert model.table["bias"].requires_grad == gradients
    with torch.no_grad():
        model.biases.mul_(2.0)
        assert torch.equal(lowtide.optimize(model, (x,))(x), model(x))


@pytest.mark.parametrize("keeps", [of_batch, drawn, written])
def test_what_follows_from_a_call_is_kept_by_the_first(x: torch.Tensor, keeps: Kept) -> None:
    left = []
    for eagerly in (True, False):
        torch.manual_seed(1)
        model = Biased(keeps).eval()
        fn = model if eagerly else lowtide.optimize(model, (x,))
        assert list(model.table) == ["before"]
        torch.manual_seed(2)
        with torch.no_grad():
            left.append([[fn(x * scale) for scale in (1, 2, 3)], list(model.table), model.table["bias"], model.places.clone()])
    assert not differences(left[0], left[1])


def test_what_a_training_step_keeps_is_refused(x: torch.Tensor) -> None:
    model = Biased(of_parameters)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(lowtide.CaptureError, match="changes its attribute 'table' in its forward"):
        lowtide.optimize(model, (x,), loss=lambda model, x: model(x).sum(), optimizer=optimizer)
