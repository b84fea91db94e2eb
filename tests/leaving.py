"""Programs that put something into places of the caller's, trained by eager and by a step."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim

import lowtide
from tests.training import differences

STEPS = 4


class Net(nn.Module):
    """Keeps what its forward computes in whatever way it is told."""

    def __init__(self, keep: Callable[[Net, Tensor], object] = lambda net, hidden: None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.outs: list[Any] = []
        self.keep = [keep]

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self.keep[0](self, hidden)
        return self.last(hidden)


class Meter:
    last: Any = None

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def update(self, value: Any, count: int) -> None:
        self.last = value
        self.seen.append((value, count))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def stepping(model: nn.Module, loss: Any, optimizer: Any, x: Any) -> Callable[[], Any]:
    """Calls a step made for a batch, with that batch."""
    step = lowtide.optimize(model, (x,), loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
    return lambda: step(x)


def trained(
    make: Callable[[], tuple[Net, Callable[..., Any], Any]], *, eagerly: bool, steps: int = STEPS, optimizer_class: Any = optim.SGD
) -> list[Any]:
    """What `steps` steps leave: results, weights, and what was put into the place that `make` names.

    By SGD a step has one program, and is captured in half the time; by Adam its first step has one of its own.
    """
    torch.manual_seed(0)
    model, loss, place = make()
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    batches = [torch.rand(5, 3) for _ in range(steps)]
    if not eagerly:
        step = lowtide.optimize(model, batches[0], loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
    results = []
    for x in batches:
        if eagerly:
            optimizer.zero_grad()
            result = loss(model, x)
            result.backward()
            optimizer.step()
        else:
            result = step(x)
        results.append(result.detach())
    return [results, model.state_dict(), plainly(place)]


class Attributes:
    """Some of an object's, as they are when they are looked at."""

    def __init__(self, item: object, *names: str) -> None:
        self.item, self.names = item, names


def plainly(item: Any) -> Any:
    """The same with detached tensors: eager's are within graphs."""
    if isinstance(item, Tensor):
        return item.detach().clone()
    if isinstance(item, Attributes):
        return [plainly(vars(item.item).get(name)) for name in item.names]
    if isinstance(item, dict):
        return {key: plainly(each) for key, each in item.items()}
    if isinstance(item, (list, tuple, collections.deque)):
        return [plainly(each) for each in item]
    return plainly(vars(item)) if isinstance(item, Meter) else item


def check(make: Callable[[], tuple[Net, Callable[..., Any], Any]]) -> None:
    found = differences(trained(make, eagerly=True), trained(make, eagerly=False))
    assert not found, "\n".join(found)
