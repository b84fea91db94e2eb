"""What each step puts into attributes of modules is no change of the caller's: nothing is looked at anew, and nothing old is kept."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import lowtide
from lowtide.runtime import premises


class Puts(nn.Module):
    def __init__(self, put: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.linear, self.put = nn.Linear(3, 3), put
        self.register_buffer("mean", torch.zeros(3))
        self.last: Any = None
        self.calls, self.scale = 0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.scale
        self.put(self, y.detach())
        return y.square().mean()


def counted(model: Any, y: Tensor) -> None:
    model.calls += 1


def gone_on(model: Any, y: Tensor) -> None:
    model.last = y if model.last is None else model.last * 0.5 + y


PUTS: dict[str, Callable[[Any, Tensor], None]] = {
    "nothing": lambda model, y: None,
    "a tensor": lambda model, y: setattr(model, "last", y),
    "a tensor in a child": lambda model, y: setattr(model.linear, "last", y),
    "a buffer": lambda model, y: setattr(model, "mean", model.mean * 0.9 + y.mean(0)),
    "a dictionary": lambda model, y: setattr(model, "last", {"y": y}),
    "a number": lambda model, y: setattr(model, "last", y.sum().item()),
    "a count": counted,
    "what goes on": gone_on,
}


def training(put: Callable[[Any, Tensor], None]) -> tuple[Puts, lowtide.Step, Tensor]:
    model, x = Puts(put), torch.arange(6.0).reshape(2, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    run = lowtide.Run(check="never")
    return model, lowtide.optimize(model, (x,), loss=lambda model, x: model(x), optimizer=optimizer, run=run), x


@pytest.mark.parametrize("put", PUTS)
def test_nothing_is_looked_at_anew(put, monkeypatch):
    _, step, x = training(PUTS[put])
    for _ in range(3):
        step(x)
    monkeypatch.setattr(premises.CallerState, "__init__", lambda *_, **__: pytest.fail("it looks at all modules again"))
    for _ in range(3):
        step(x)


@pytest.mark.parametrize("put", PUTS)
def test_what_the_caller_changes_is_noticed(put):
    """Also in the attributes that the step sets, and in the same call as others."""
    model, step, x = training(PUTS[put])
    eager = copy.deepcopy(model)
    optimizer = optim.SGD(eager.parameters(), lr=0.01)
    for at in range(8):
        for each in (model, eager):
            if at == 4:
                each.scale = 2.0
            if at == 5:
                each.last = None
            if at == 6:
                each.mean = torch.ones(3)
                each.linear.last = 3  # type: ignore[assignment]
        value = step(x)
        expected = eager(x)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(value, expected.detach())
        assert all(torch.equal(one, other) for one, other in zip(model.state_dict().values(), eager.state_dict().values(), strict=True))
        assert str([model.last, model.calls, vars(model.linear).get("last")]) == str(
            [eager.last, eager.calls, vars(eager.linear).get("last")]
        )


def test_the_tensor_that_lay_there_before_is_let_go():
    model, step, x = training(PUTS["a tensor"])
    kept = []
    for _ in range(4):
        step(x)
        kept.append(weakref.ref(model.last))
        gc.collect()
    assert [each() is not None for each in kept] == [False, False, False, True]
