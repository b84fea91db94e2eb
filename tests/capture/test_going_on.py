"""Tensors beside the model that a program reads and puts others in the places of: each step reads what the one before has left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.leaving import Attributes, Meter, Net, check, square


class Centred(nn.Module):
    """A criterion that follows what it is given, as DINO's does."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(2))
        self.register_buffer("scale", torch.ones(()))
        self.last: Tensor | None = None

    def forward(self, out: Tensor) -> Tensor:
        value = (out - self.center).square().mean() * self.scale
        self.last = out.detach()
        self.center = 0.9 * self.center + 0.1 * out.detach().mean(0)
        return value


def of_a_criterion() -> Any:
    criterion = Centred()
    return Net(), lambda model, x: criterion(model(x)), Attributes(criterion, "_buffers", "last")


def twice_in_a_step() -> Any:
    criterion = Centred()
    return Net(), lambda model, x: criterion(model(x)) + criterion(model(x * 2)), Attributes(criterion, "_buffers", "last")


def of_an_object() -> Any:
    meter = Meter()
    meter.last = torch.zeros(())

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        meter.last = 0.9 * meter.last + square(model, x).detach()
        return square(model, x) * meter.last

    return Net(), loss, meter


def of_a_variable() -> Any:
    kept, last = Meter(), torch.zeros(())

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal last
        last = 0.9 * last + square(model, x).detach()
        kept.last = last * 1.0
        return square(model, x) * last

    return Net(), loss, kept


@pytest.mark.parametrize("make", [of_a_criterion, twice_in_a_step, of_an_object, of_a_variable], ids=lambda make: make.__name__)
@pytest.mark.filterwarnings("error:lowtide has captured:UserWarning")
def test_each_step_goes_on_with_it(make: Callable[[], Any]) -> None:
    check(make)


def step_of(criterion: Centred, model: nn.Module, more: Callable[[], Any] = lambda: 0.0) -> lowtide.Step:
    return lowtide.optimize(
        model,
        torch.ones(3, 3),
        loss=lambda model, x: criterion(model(x)) + more(),
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        planning=lowtide.Planning(workspaces=False),
    )


def test_what_is_put_there_between_steps_is_read() -> None:
    criterion, model = Centred(), Net()
    step = step_of(criterion, model)
    step(torch.ones(3, 3))
    criterion.center = torch.full((2,), 2.0)
    with torch.no_grad():
        expected = (model(torch.ones(3, 3)) - 2.0).square().mean()
    assert torch.equal(step(torch.ones(3, 3)), expected)


def also_in_a_list(criterion: Centred) -> Callable[[], Any]:
    known = [criterion.center]
    return lambda: known[0].sum()


def test_the_one_before_that_is_put_elsewhere_is_refused() -> None:
    criterion, meter = Centred(), Meter()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        meter.last = criterion.center
        return criterion(model(x))

    model = Net()
    with pytest.raises(lowtide.CaptureError, match="'center' of a Centred"):
        lowtide.optimize(
            model,
            torch.ones(3, 3),
            loss=loss,
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            planning=lowtide.Planning(workspaces=False),
        )
    assert meter.last is None


def test_what_a_list_holds_as_well_is_refused_and_put_back() -> None:
    criterion = Centred()
    before = criterion.center
    with pytest.raises(lowtide.CaptureError, match=r"'center' of a Centred.*copy_ goes on"):
        step_of(criterion, Net(), also_in_a_list(criterion))
    assert criterion.center is before
    assert criterion.last is None


def test_a_refusal_leaves_no_fakes_in_modules_beside_the_model() -> None:
    criterion = Centred()
    with pytest.raises(lowtide.CaptureError, match="control flow depends on data"):
        step_of(criterion, Net(), lambda: 1.0 if criterion.center.sum() > 0 else 2.0)
    assert type(criterion.center) is Tensor
    assert criterion.last is None


class Pair(tuple[int, int]):
    """Its length means something else, as in e3nn."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_tuple_with_a_length_of_its_own_beside_the_model() -> None:
    pair = Pair((1, 2))
    step = lowtide.optimize(
        model := Net(),
        torch.ones(3, 3),
        loss=lambda model, x: square(model, x) * pair[1],
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        planning=lowtide.Planning(workspaces=False),
    )
    assert step(torch.ones(3, 3)) > 0
