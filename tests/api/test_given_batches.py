"""Micro-batches that are given one by one: of other lengths, weighted by the caller, summed as the plain loop does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from bench.in_values import in_values
from lowtide.errors import BatchError
from tests.training import differences

LENGTHS = ((5, 3), (4, 7), (2, 2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.drop, self.head = nn.Embedding(20, 8), nn.Dropout(0.2), nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.words(tokens))))


def loss(model: nn.Module, tokens: Tensor, labels: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count, logits.argmax(-1)


def clip(model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def window(lengths: tuple[int, ...], seed: int) -> list[dict[str, Tensor]]:
    """Micro-batches of these lengths, with the number of tokens of all."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(20, (2, length), generator=generator) for length in lengths]
    return [{"tokens": each, "labels": each.roll(1, 1), "count": torch.tensor(2 * sum(lengths))} for each in drawn]


def eager(model: nn.Module, optimizer: Any, batches: list[dict[str, Tensor]]) -> Any:
    results = []
    for batch in batches:
        value, chosen = loss(model, **batch)
        value.backward()
        results.append((value.detach(), chosen))
    norm = clip(model)
    optimizer.step()
    optimizer.zero_grad()
    return results, norm


def trained(make_step: Any, lengths: Any = LENGTHS) -> Any:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    step = make_step(model, optimizer)
    results = [copy.deepcopy(step(*window(each, seed))) for seed, each in enumerate(lengths)]
    return copy.deepcopy([results, dict(model.state_dict()), optimizer.state_dict(), torch.get_rng_state()])


def optimized(model: nn.Module, optimizer: Any, **arguments: Any) -> lowtide.Step:
    example = window(LENGTHS[0], 0)
    return lowtide.optimize(
        model,
        example,
        loss=loss,
        optimizer=optimizer,
        **in_values(after_backward=clip, accumulate="batches", workspaces=False, **arguments),
    )


@pytest.mark.parametrize("arguments", [{"on_new_shape": "extend"}, {"on_new_shape": "eager"}, {"dynamic": "auto"}, {"memory": 12_000}])
def test_sums_what_the_plain_loop_sums(arguments: dict[str, Any]):
    expected = trained(lambda model, optimizer: lambda *batches: eager(model, optimizer, list(batches)))
    found = trained(lambda model, optimizer: optimized(model, optimizer, **arguments))
    assert not differences(expected, found)


def test_each_micro_batch_has_a_range_of_its_own():
    axes = {f"[{index}]['{name}']": {1: f"length_{index}"} for index in range(2) for name in ("tokens", "labels")}
    for index in range(2):
        axes[f"[{index}]['tokens']"] = {1: (f"length_{index}", 2, 8)}
    steps: list[lowtide.Step] = []

    def make(model: nn.Module, optimizer: Any) -> lowtide.Step:
        steps.append(optimized(model, optimizer, dynamic=axes))
        return steps[0]

    lengths = (*LENGTHS, (8, 2), (2, 8))
    expected = trained(lambda model, optimizer: lambda *batches: eager(model, optimizer, list(batches)), lengths)
    assert not differences(expected, trained(make, lengths))
    assert len(steps[0].ranges) >= 1


def test_another_number_of_micro_batches_is_refused():
    model = Net()
    step = optimized(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(BatchError, match="is missing"):
        step(*window((5,), 0))


def test_a_word_that_says_nothing_is_refused():
    model = Net()
    with pytest.raises(ValueError, match='or "batches" that are given'):
        lowtide.optimize(
            model, window((2,), 0), loss=loss, optimizer=torch.optim.SGD(model.parameters()), training=lowtide.Training(accumulate="each")
        )
