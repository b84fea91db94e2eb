"""`torch.cond`, `torch.while_loop` and compiled functions within a step: read as Python's own, and left as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

import lowtide


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        return torch.cond(count > 1, lambda y: self.one(y), lambda y: self.other(y).sin(), (x,))


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        _, times = while_loop(lambda i, y: i < count, lambda i, y: (i + 1, (y * 1.5).sin()), (torch.tensor(0), x))
        return self.layer(x) * times


def loss(model: nn.Module, x: Tensor, count: Tensor) -> Tensor:
    return model(x, count).square().mean()


@pytest.mark.parametrize("kind", [Branches, Loop])
def test_each_step_goes_the_way_that_its_data_say(kind: Callable[[], nn.Module]) -> None:
    model = kind()
    twin, x = copy.deepcopy(model), torch.randn(4, 3)
    step = lowtide.optimize(
        model,
        (x, torch.tensor(3)),
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        planning=lowtide.Planning(workspaces=False),
        run=lowtide.Run(check="never"),
    )
    eager = torch.optim.SGD(twin.parameters(), 0.1)
    for count in (3, 1, 3):
        eager.zero_grad()
        expected = loss(twin, x, torch.tensor(count))
        expected.backward()
        eager.step()
        assert torch.equal(step(x, torch.tensor(count)), expected)
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_which_branch_may_not_follow_from_parameters() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(lowtide.CaptureError, match="control flow depends on data"):
        lowtide.optimize(
            model, torch.ones(2, 3), loss=lambda model, x: torch.cond(model(x).sum() > 0, torch.sum, torch.mean, (x,)),
            optimizer=torch.optim.SGD(model.parameters(), 0.1), planning=lowtide.Planning(workspaces=False),
        )  # fmt: skip


def test_a_compiled_function_is_compiled_after_a_capture_as_before() -> None:
    compiled: list[Any] = []

    def counting(module: Any, inputs: Any) -> Any:
        compiled.append(module)
        return module.forward

    model = nn.Linear(3, 3)
    function = torch.compile(lambda y: y.sin() * 2, backend=counting)
    x = torch.ones(2, 3)
    step = lowtide.optimize(
        model,
        x,
        loss=lambda model, x: function(model(x)).sum(),
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        planning=lowtide.Planning(workspaces=False),
    )
    assert torch.equal(step(x), step(x)) is False
    assert not compiled
    function(x)
    assert len(compiled) == 1


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_flex_attention_is_refused_with_what_can_be_used_for_it() -> None:
    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return flex_attention(x, x, x)

    with pytest.raises(lowtide.CaptureError, match=r"flex_attention at .*scaled_dot_product_attention"):
        lowtide.optimize(Attends(), torch.ones(1, 2, 4, 8), planning=lowtide.Planning(workspaces=False))


class Compiles(torch.optim.SGD):
    """Compiles its update and wants it whole, as torchao's optimizers do."""

    update = staticmethod(torch.compile(lambda parameter, gradient: parameter.sub_(gradient * 0.5), fullgraph=True, backend="eager"))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.update(parameter, parameter.grad)


def test_an_optimizer_that_compiles_its_update_steps_as_it_is_written() -> None:
    model = nn.Linear(3, 3)
    twin, x = copy.deepcopy(model), torch.randn(4, 3)
    step = lowtide.optimize(
        model,
        x,
        loss=lambda model, x: model(x).square().mean(),
        optimizer=Compiles(model.parameters(), 0.1),
        planning=lowtide.Planning(workspaces=False),
    )
    for _ in range(3):
        twin.zero_grad()
        twin(x).square().mean().backward()
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.sub_(parameter.grad * 0.5)
        step(x)
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, its)
