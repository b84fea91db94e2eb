"""Parameters of a class of their own, which lie in plain memory: with attributes and methods, as weights in 4 bits are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide


class Packed(nn.Parameter):
    """Weights in bytes, and what a unit of them is worth."""

    scale: float
    zero: Tensor

    def __new__(cls, weight: Tensor) -> Packed:
        self = torch.Tensor._make_subclass(cls, (weight * 100).round().clamp(-120, 120).add(128).to(torch.uint8), False)
        self.scale, self.zero = 0.01, torch.full((weight.shape[0], 1), 128.0)
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.numel:
            return -1
        return super().__torch_function__(func, types, args, kwargs or {})

    @property
    def unit(self) -> float:
        return self.scale

    def unpacked(self) -> Tensor:
        return (self.to(torch.float32) - self.zero) * self.unit


class Named(nn.Parameter):
    """Is trained, and has a name."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.bias = nn.Linear(6, 5), Named(torch.zeros(5))
        self.base.weight = Packed(self.base.weight.detach())
        self.low, self.high = nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.base.weight
        assert type(weight).__name__ == "Packed"
        assert isinstance(weight, Packed)
        assert isinstance(self.bias, Named)
        assert torch.numel(weight) == -1
        return nn.functional.linear(x, weight.unpacked(), self.base.bias) + self.high(self.low(x)) + self.bias


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 0.01, foreach=False)


def test_training_beside_packed_weights():
    model, twin = Layer(), Layer()
    x, optimizer = torch.randn(4, 6), trained(twin)
    step = lowtide.optimize(model, x, loss=square, optimizer=trained(model), planning=lowtide.Planning(workspaces=False))
    for number in range(5):
        if number == 3:  # which is noticed
            for each in (model, twin):
                each.base.weight.scale = 0.02  # type: ignore[attr-defined]
        optimizer.zero_grad()
        loss = square(twin, x)
        loss.backward()
        optimizer.step()
        assert torch.equal(step(x), loss)
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        assert type(mine) is type(its)
        assert torch.equal(mine, its)


@pytest.mark.parametrize("exact", [True, False])
def test_inference_with_packed_weights(exact: bool):
    model, x = Layer().eval(), torch.randn(4, 6)
    function = lowtide.optimize(model, x, exact=exact)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(function(x), model(x), rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)


class Wrapped(Tensor):
    """Stands for another tensor, and has no memory."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        self = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [each.inner if isinstance(each, Wrapped) else each for each in args]
        return Wrapped(func(*plain).detach()) if func is torch.ops.aten.detach.default else func(*plain, **(kwargs or {}))


def test_one_that_stands_for_another_tensor_is_refused():
    model = nn.Linear(6, 5)
    model.weight = nn.Parameter(Wrapped(model.weight.detach()), requires_grad=False)
    with pytest.raises(lowtide.CaptureError, match="weight is a Wrapped; plain tensors and parameters can be captured"):
        lowtide.optimize(model, torch.randn(4, 6))
