"""`after_backward` finds gradients wherever a plain loop would: on the caller's own parameters, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.training import differences


def trained(change: Any, optimized: bool) -> Any:
    """Weights after three steps in which `change(model, parameters, optimizer)` does something to gradients, and what it returned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.5, foreach=False)
    parameters, (x, y) = list(model.parameters()), (torch.randn(4, 8), torch.randint(3, (4,)))
    left = parameters[0].grad = torch.ones(16, 8)

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), y)

    def after_backward(model: nn.Module) -> Any:
        return change(model, parameters, optimizer)

    if optimized:
        step = lowtide.optimize(
            model,
            (x, y),
            loss=loss,
            optimizer=optimizer,
            training=lowtide.Training(after_backward=after_backward),
            planning=lowtide.Planning(workspaces=False),
        )
        assert parameters[0].grad is left
    optimizer.zero_grad()
    for _ in range(3):
        if optimized:
            returned = step(x, y)
            returned = returned[1] if isinstance(returned, tuple) else None
        else:
            loss(model, x, y).backward()
            returned = after_backward(model)
            optimizer.step()
            optimizer.zero_grad()
    return [each.detach() for each in parameters], returned


def halve(model: Any, parameters: Any, optimizer: Any) -> None:
    for each in parameters:
        each.grad = each.grad * 0.5


def drop(model: Any, parameters: Any, optimizer: Any) -> None:
    parameters[0].grad = None


@pytest.mark.parametrize(
    "change",
    [
        lambda model, parameters, optimizer: nn.utils.clip_grad_norm_(parameters, 0.1),
        lambda model, parameters, optimizer: nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1),
        lambda model, parameters, optimizer: nn.utils.clip_grad_value_(parameters, 0.01),
        lambda model, parameters, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        halve,
        drop,
        lambda model, parameters, optimizer: parameters[0].grad.mul_(parameters[0].norm()),
    ],
)
def test_gradients_lie_on_the_callers_parameters(change: Any):
    assert not (told := differences(trained(change, False), trained(change, True))), "\n".join(told)


def test_parameters_without_memory_have_gradients_too():
    model = nn.Linear(4, 2, device="meta")
    optimizer, parameters = torch.optim.SGD(model.parameters()), list(model.parameters())
    step = lowtide.optimize(
        model, torch.ones(3, 4), loss=lambda model, x: model(x).sum(), optimizer=optimizer,
        training=lowtide.Training(after_backward=lambda model: nn.utils.clip_grad_norm_(parameters, 1.0)),
    )  # fmt: skip
    assert any("linalg_vector_norm" in node.op for node in step.plan.graph.nodes)
    assert all(each.grad is None for each in parameters)
