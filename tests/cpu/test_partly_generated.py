"""Programs of which torch runs a part: calls like the last one notice all that the long way notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide

WARM = 4  # calls: later ones are like the last


class Spoken(nn.Module):
    """A lookup by torch before generated kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.one, self.square, self.two = nn.Embedding(50, 32), nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.two(self.square(self.one(self.table(tokens)).relu()))
        return found


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def made(request: pytest.FixtureRequest) -> Iterator[tuple[lowtide.Step, Spoken, torch.Tensor]]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    torch.manual_seed(0)
    model, tokens = Spoken().eval(), torch.randint(0, 50, (1, 12))
    yield _warm(lowtide.optimize(model, (tokens,), exact=False), tokens), model, tokens
    torch.set_num_threads(before)


def _warm(step: lowtide.Step, tokens: torch.Tensor) -> lowtide.Step:
    for _ in range(WARM):
        step(tokens)
    return step


def _near(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.allclose(one, two, rtol=1e-4, atol=1e-5)


def test_batches_differ_and_results_follow(made: tuple[lowtide.Step, Spoken, torch.Tensor]):
    step, model, _ = made
    for _ in range(5):
        tokens = torch.randint(0, 50, (1, 12))
        assert _near(step(tokens), model(tokens))
    assert step._again is not None


CHANGES: dict[str, Callable[[Spoken], Any]] = {
    "the table, which torch reads": lambda model: model.table.weight.data.mul_(2),
    "another table": lambda model: setattr(model, "table", nn.Embedding(50, 32)),
    "a weight of kernels": lambda model: model.one.weight.data.mul_(2),
    "written": lambda model: model.two.bias.data.copy_(torch.ones(8)),
    "a hook": lambda model: model.two.register_forward_hook(lambda module, args, result: 2 * result),
    "a hook with keywords": lambda model: model.two.register_forward_hook(lambda module, args, kwargs, result: -result, with_kwargs=True),
    "a hook before": lambda model: model.two.register_forward_pre_hook(
        lambda module, args, kwargs: ((-args[0],), kwargs), with_kwargs=True
    ),
    "another class": lambda model: setattr(model.one, "__class__", _Negative),
    "a table of another size": lambda model: setattr(model.table.weight, "data", torch.ones(60, 32)),
    "a weight turned in its memory": lambda model: setattr(model.square.weight, "data", model.square.weight.data.t()),
    "an entry more": lambda model: model.__dict__.update(forward=lambda tokens: model.two(model.one(model.table(tokens)))),
}


class _Negative(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return -super().forward(input)


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed(made: tuple[lowtide.Step, Spoken, torch.Tensor], change: str):
    step, model, tokens = made
    before = step(tokens)
    CHANGES[change](model)
    assert not _near(model(tokens), before)
    for _ in range(WARM):
        assert _near(step(tokens), model(tokens))


def test_a_switch_of_torch_is_noticed(made: tuple[lowtide.Step, Spoken, torch.Tensor]):
    step, model, tokens = made
    with torch.autocast("cpu", torch.bfloat16):
        assert step(tokens).dtype == model(tokens).dtype == torch.bfloat16
    assert step(tokens).dtype == torch.float32


def test_a_token_that_is_not_in_the_table_raises_as_eager(made: tuple[lowtide.Step, Spoken, torch.Tensor]):
    step, model, tokens = made
    wrong = torch.full_like(tokens, 50)
    with pytest.raises(IndexError):
        model(wrong)
    with pytest.raises(IndexError):
        step(wrong)
    assert _near(step(tokens), model(tokens))
