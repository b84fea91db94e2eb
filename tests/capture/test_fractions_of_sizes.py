"""Numbers that follow from a size of a range, computed by each call as Python computes them: to the last bit, in the program's order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

import lowtide

FORMULAS: dict[str, Callable[[Any], Any]] = {
    "float": lambda n: float(n) ** -0.5,
    "functions": lambda n: math.log(n) * math.exp(-n / 7) + math.log2(n) - math.tanh(1.0 / n) + math.log1p(n),
    "roots": lambda n: 0.5 * (1.0 / math.sqrt(n)) + n**0.5 + torch.sym_sqrt(n) / torch.sym_sqrt(n * 0.1),
    "sums": lambda n: 0.1 * n + 0.2 * n + 2 * n - 0.7,
    "orders": lambda n: (0.1 * n) * 0.3 + 0.1 * (n * 0.3) + (n - 1) * 0.7 * n / 3,
    "quotients": lambda n: math.log(n) / math.log(2) + 1 / (n + 3) - float(n) * float(n + 1) * 0.01,
    "shares": lambda n: int(n * 0.75) + math.ceil(n / 4) + int(n) * 2,
}


def check(loss: Callable[..., Tensor], batches: list[Any], dynamic: Any) -> None:
    """Train by eager and by one step for a range."""
    trained = []
    for eagerly in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        if not eagerly:
            shapes, planning = lowtide.Shapes(dynamic=dynamic, on_new_shape="error"), lowtide.Planning(workspaces=False)
            step = lowtide.optimize(model, batches[0], loss=loss, optimizer=optimizer, shapes=shapes, planning=planning)
        results = []
        for batch in batches:
            if eagerly:
                optimizer.zero_grad()
                result = loss(model, *batch)
                result.backward()
                optimizer.step()
            else:
                result = step(*batch)
            results.append(result.detach())
        trained.append([*results, *(each.detach().clone() for each in model.parameters())])
    assert all(map(torch.equal, *trained))


@pytest.mark.filterwarnings("error:.*parts of the range apart")
@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
def test_each_call_computes_with_its_own_size(formula: Callable[[Any], Any]):
    batches = [(torch.rand(2, length, 8),) for length in (4, 6, 3, 7, 5)]
    check(lambda model, x: (model(x) * formula(x.shape[1])).square().mean(), batches, {0: {1: (2, 8)}})


@pytest.mark.filterwarnings("ignore:.*parts of the range apart")
@pytest.mark.parametrize(
    "read",
    [
        lambda n: torch.tensor(n).item(),
        lambda n: torch.full((2,), n).tolist()[1],
        lambda n: int(torch.ones(n).sum()),
        lambda n: torch.arange(n)[-1].item(),
        lambda n: 2 if torch.tensor(n) > 5 else 3,
    ],
    ids=["number", "list", "sum", "last", "branch"],
)
def test_what_is_read_of_a_size_is_read_again_for_another(read: Callable[[Any], Any]):
    batches = [(torch.rand(2, length, 8),) for length in (4, 6, 3, 7, 4)]
    check(lambda model, x: (model(x) * read(x.shape[1])).square().mean(), batches, {0: {1: (2, 8)}})


def test_lengths_of_tensors_follow_sizes():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        half = model(x)[: len(x) // 2]
        return half.square().sum() / len(half) + len(x[0]) * float(len("ab")) * half.mean()

    check(loss, [(torch.rand(rows, 8),) for rows in (4, 6, 3, 7, 5)], {0: {0: (2, 8)}})


def test_what_sympy_takes_for_one_number_is_refused():
    """Python's sum is 0 for some lengths, and a last bit for others."""
    with pytest.raises(lowtide.CaptureError, match="whose last bits a graph cannot promise"):
        check(
            lambda model, x: (model(x) * (1.0 + (x.shape[1] * 0.1 + x.shape[1] * 0.3 - x.shape[1] * 0.4))).square().mean(),
            [(torch.rand(2, 4, 8),)],
            {0: {1: (2, 8)}},
        )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_whose_gradients_have_no_fake_kernel(reduction: str):
    def loss(model: nn.Module, x: Tensor, one: Tensor, several: Tensor) -> Tensor:
        out = model(x)
        first = F.multi_margin_loss(out, one, reduction=reduction).mean()
        return first + F.multilabel_margin_loss(out, several, reduction=reduction).mean()

    batches = []
    for rows in (4, 6, 3, 7, 5):
        several = torch.full((rows, 8), -1)
        several[:, :3] = torch.rand(rows, 8).argsort(1)[:, :3]
        batches.append((torch.rand(rows, 8), torch.randint(0, 8, (rows,)), several))
    check(loss, batches, {0: {0: ("rows", 2, 8)}, 1: {0: "rows"}, 2: {0: "rows"}})


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x: model(x).square().mean() * (2.0 if x.shape[0] == 4 else 3.0),
        lambda model, x: model(x).square().sum() if len(x) > 4 else sum(model(x[at]).sum() * at for at in range(len(x))),
    ],
    ids=["branch", "loop"],
)
def test_a_number_that_has_a_program_of_its_own_is_captured_apart(loss: Callable[..., Tensor]):
    check(loss, [(torch.rand(rows, 8),) for rows in (6, 4, 7, 4, 3, 5)], {0: {0: (2, 8)}})
