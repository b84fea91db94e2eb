"""Programs that cannot be captured: `refused` holds `optimize` to its message, and to touching nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import lowtide
from bench.in_values import in_values
from tests.training import Settings as Plain
from tests.training import Snapshot, eager_step

HERE = r"(?:test_refused_\w+|test_program_checks|refusals)\.py:\d+"
WHERE = rf"\S*{HERE}"


class Net(nn.Module):
    """Something with everything a failure could leave changed: statistics, hooks, lists, optimizer state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear, self.norm = nn.Embedding(9, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.recurrent = nn.GRU(4, 4)
        self.calls, self.log, self.cache = 0, [0], {}
        self.last: Tensor | None = None
        self.mode, self.length, self.sizes = "sparse", None, (1, 2)
        self.linear.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(self.recurrent(x[None])[0][0]))  # one step of many rows


def refused(
    loss: Callable[..., Any], message: str, *, optimizer: Any = optim.AdamW, error: type = lowtide.CaptureError, **arguments: Any
) -> None:
    """`optimize` raises this error, before and after training has begun, and leaves everything as it was."""
    torch.manual_seed(0)
    model = Net()
    made = optimizer(model.parameters(), lr=0.1)
    batch = arguments.pop("batch", (torch.randn(6, 4),))
    for _ in range(2):
        before = Snapshot.of(model, made)
        with pytest.raises(error, match=message):
            lowtide.optimize(model, batch, loss=loss, optimizer=made, **in_values(workspaces=False, **arguments))
        before.assert_same(model, made)
        if isinstance(made, (optim.LBFGS, optim.SparseAdam)):
            return
        eager_step(model, lambda model, x: model(x).square().sum(), made, (torch.randn(6, 4),), {}, Plain())


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *batch: Any) -> Any:
        return self.function(*batch)


def no_nan(h: Tensor) -> None:
    """An assertion as a program has it: pytest writes those of its own test files anew."""
    assert not h.isnan().any(), "no numbers"
