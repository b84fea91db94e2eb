"""Numbers that only the running step knows, where operators are given them and where a program asks of one whether to raise."""

from __future__ import annotations

import copy
import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

import lowtide
from tests.leaving import Attributes, Meter, Net, check, square


class State:
    """A count and a total, as trainers keep them."""

    def __init__(self) -> None:
        self.calls, self.total = 0, 0.0

    def __call__(self, value: Tensor) -> tuple[float, int]:
        number = value.item()
        self.calls += 1
        self.total += number
        return number, self.calls


def using(use: Callable[[Tensor, float, State, Tensor], Tensor]) -> Callable[[], Any]:
    def make() -> Any:
        state = State()

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            value = square(model, x)
            number, _ = state(value)
            return use(value, number, state, x)

        return Net(), loss, Attributes(state, "calls", "total")

    return make


USES: dict[str, Callable[[Tensor, Any, State, Tensor], Tensor]] = {
    "a loss by its own number": lambda value, number, state, x: value / number + number * value - (number - value),
    "a weight that warms up": lambda value, number, state, x: value * min(1.0, state.calls / 3) + 0.9**state.calls,
    "a cosine": lambda value, number, state, x: value * (1 + math.cos(math.pi * state.calls / 10)),
    "a mean of earlier steps": lambda value, number, state, x: value / (1 + state.total / state.calls),
    "new tensors": lambda value, number, state, x: (value * torch.tensor([[number, 1.0], [state.total, state.calls]])).sum(),
    "of one kind": lambda value, number, state, x: value * x.new_tensor(number) * torch.full((2,), number).sum() + torch.as_tensor(number),
    "a share": lambda value, number, state, x: torch.add(value, value, alpha=number).clamp(max=number) + (x > number).sum(),
    "whole numbers": lambda value, number, state, x: value + (x > 0.5).long().mul(state.calls).sum() * torch.full((), state.calls),
    "whole numbers made fractions": lambda value, number, state, x: value * ((x > 0.5).long() * state.calls).float().mean(),
    "a share by mixed numbers": lambda value, number, state, x: (
        value * (1 - min(1, state.calls / 3)) * torch.tensor([min(1, number), 0.5]).sum()
    ),
    "squares": lambda value, number, state, x: (
        value * torch.tensor([(x > number).sum().item() ** 2, 3]).float().std() + (x.long() * state.calls**2).sum()
    ),
    "a quotient": lambda value, number, state, x: value * (1 / number) + value / (number + state.total) + 3 % number + 3 // (1 + number),
    "a quotient of counts": lambda value, number, state, x: value * (1 / state.calls) + value * ((x > 0.1).sum().item() % state.calls),
    "a power by a modulus": lambda value, number, state, x: value * (1 + pow(state.calls, 2, 5)),
    "a mask filled": lambda value, number, state, x: value * x.masked_fill(x > 0.5, number).index_fill(0, torch.tensor([0]), number).sum(),
    "an answer": lambda value, number, state, x: value * torch.tensor(number > 0.1),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_operators_compute_with_the_number_of_each_step(use):
    check(using(use))


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def by_a_weight(model: Any, x: Tensor) -> Tensor:
    return square(model, x) * model.first.weight.max().item()


def by_an_entry(model: Any, x: Tensor) -> Tensor:
    return square(model, x) * model(x)[0].tolist()[1]


def by_a_count_of_batches(model: Any, x: Tensor) -> Tensor:
    model(x)
    return square(model, x) / model.norm.num_batches_tracked.item()


@pytest.mark.parametrize("loss", [by_a_weight, by_an_entry, by_a_count_of_batches])
def test_numbers_of_what_the_step_writes_are_those_of_that_moment(loss):
    check(lambda: (Normed(), loss, []))


REFUSED: dict[str, Callable[[Tensor, Any, State, Tensor], Tensor]] = {
    "a power, whose gradient computes with the number itself": lambda value, number, state, x: value**number,
    "a rate": lambda value, number, state, x: nn.functional.dropout(value, 0.1 * state.calls),
    "a whole number or a fraction": lambda value, number, state, x: value * ((x > 0.5).long() * max(state.calls, 2.0)).float().mean(),
    "a tensor of one": lambda value, number, state, x: value * torch.tensor(min(1, state.calls / 2)),
    "a whole power": lambda value, number, state, x: value * torch.tensor(2 ** (x > 0.5).sum().item()),
}


@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED)
def test_what_would_compute_with_a_number_elsewhere_is_refused(use):
    model, loss, _ = using(use)()
    with pytest.raises(lowtide.CaptureError, match="control flow depends on data"):
        lowtide.optimize(model, torch.rand(5, 3), loss=loss, optimizer=optim.SGD(model.parameters()))


SIZES: dict[str, Callable[[Tensor, Any, State, Tensor], Tensor]] = {
    "in a tuple, of an operator that takes numbers": lambda value, number, state, x: value * torch.full((state.calls,), 0.5).sum(),
    "in a list": lambda value, number, state, x: value * x.new_full([2, state.calls], number).sum(),
    "the first of several": lambda value, number, state, x: value * (torch.ones(state.calls, 2).sum() + torch.rand(state.calls, 2).sum()),
    "the first of a method": lambda value, number, state, x: value * x[0].expand(state.calls, -1).sum() + x.new_ones(state.calls, 1).sum(),
}


@pytest.mark.filterwarnings("ignore:lowtide has captured the step anew")
@pytest.mark.parametrize("use", SIZES.values(), ids=SIZES)
def test_a_count_is_a_size_wherever_it_stands(use):
    check(using(use))


def test_a_rate_that_is_drawn_is_refused_with_what_to_write():
    model, loss, _ = using(lambda value, number, state, x: nn.functional.dropout(value, random.uniform(0.1, 0.4)))()
    with pytest.raises(lowtide.CaptureError, match=r"write dropout\(\) out as arithmetic"):
        lowtide.optimize(model, torch.rand(5, 3), loss=loss, optimizer=optim.SGD(model.parameters()))


MESSAGES: dict[str, Callable[[Tensor, Any, State, Tensor], Any]] = {
    r"decides a condition": lambda value, number, state, x: value if number < 0.1 else value * 2,
    r"is a position or a size": lambda value, number, state, x: [value, value * 2][int(number > 1)],
    r"is a key of a dictionary": lambda value, number, state, x: {number: value}[number],
    r"is given to leaky_relu\(\)": lambda value, number, state, x: nn.functional.leaky_relu(value, number),
    r"is made an array of NumPy's": lambda value, number, state, x: value * float(np.mean([number, 1.0])),
    r"is asked for its 'hex'": lambda value, number, state, x: value * len(number.hex()),
}


@pytest.mark.parametrize("use", MESSAGES)
def test_a_refusal_says_what_the_number_is_used_for_and_on_which_line(use):
    model, loss, _ = using(MESSAGES[use])()
    with pytest.raises(lowtide.CaptureError, match=rf"More closely: a number read from a tensor {use}.* at .*{__file__}"):
        lowtide.optimize(model, torch.rand(5, 3), loss=loss, optimizer=optim.SGD(model.parameters()))


def test_a_quotient_by_zero_fails_before_a_parameter_is_written():
    model, kept = Net(), list[float]()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        kept.append(1 / (model(x).sum() * x.sum()).item())
        return square(model, x)

    step = lowtide.optimize(model, torch.rand(5, 3), loss=loss, optimizer=optim.SGD(model.parameters(), lr=0.1))
    step(torch.rand(5, 3))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ZeroDivisionError):
        step(torch.zeros(5, 3))
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    assert len(kept) == 1


def test_an_average_of_weights_that_warms_up():
    def make() -> Any:
        model, state = Net(), State()
        average = copy.deepcopy(model).requires_grad_(False)

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            value = square(model, x)
            state(value)
            decay = min(0.99, (1 + state.calls) / (10 + state.calls))
            with torch.no_grad():
                for kept, now in zip(average.parameters(), model.parameters(), strict=True):
                    kept.mul_(decay).add_(now, alpha=1 - decay)
            return value

        return model, loss, list(average.parameters())

    check(make)


def test_a_number_is_added_to_a_tensor_that_lies_in_its_place():
    def make() -> Any:
        meter, table = Meter(), {"last": torch.tensor(0.0)}
        meter.last = torch.tensor(0.0)

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            value = square(model, x)
            meter.last += value.item()
            table["last"] += value.item()
            return value

        return Net(), loss, [meter, table]

    check(make)


def test_a_total_that_is_set_to_a_whole_number_between_steps_is_computed_with():
    results = []
    for eagerly in (True, False):
        torch.manual_seed(0)
        model, state = Net(), State()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        batches = [torch.rand(5, 3) for _ in range(4)]

        def loss(model: nn.Module, x: Tensor, state: State = state) -> Tensor:
            value = square(model, x)
            state(value)
            return value * state.total

        step = None if eagerly else lowtide.optimize(model, batches[0], loss=loss, optimizer=optimizer)
        for at, x in enumerate(batches):
            state.total = 0 if at == 2 else state.total
            if step is not None:
                results.append(step(x))
                continue
            optimizer.zero_grad()
            results.append(loss(model, x))
            results[-1].backward()
            optimizer.step()
    assert torch.equal(torch.stack(results[:4]), torch.stack(results[4:]))


def is_finite(model: nn.Module, x: Tensor) -> Tensor:
    value = square(model, x)
    if not math.isfinite(value.item()):
        raise FloatingPointError("the loss has no number")
    return value


def is_small(model: nn.Module, x: Tensor) -> Tensor:
    value = square(model, x)
    number = value.item()
    if math.isnan(number) or number > 1e6:
        raise FloatingPointError("the loss is no number, or a large one")
    return value


@pytest.mark.parametrize("loss", [is_finite, is_small])
def test_a_check_of_a_number_raises_in_the_step_that_fails_it(loss):
    model = Net()
    step = lowtide.optimize(model, torch.rand(5, 3), loss=loss, optimizer=optim.SGD(model.parameters()))
    step(torch.rand(5, 3))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FloatingPointError, match="the loss"):
        step(torch.full((5, 3), float("nan")))
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())


def test_answers_that_go_out_are_those_of_each_step():
    def make() -> Any:
        kept, state = list[Any](), State()

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            out = model(x)
            value = out.square().mean()
            number = value.item()
            kept.append([number > 0.05, number == 0.0, math.isfinite(number), (out > 0).all().item(), (out > 0)[0].tolist()])
            kept.append(f"{number > 0.05}")
            kept.append([statistics.mean([number, state.total]), math.hypot(number, 0.5), statistics.median((number, 0.1, 0.3)) / 2])
            state.calls += number > 0.05
            state.total += float(number > 0.05) + int(number > 0.06)
            return value

        return Net(), loss, [kept, Attributes(state, "calls", "total")]

    check(make)
