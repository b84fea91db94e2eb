"""Tensors that are no plain ones, and what torch puts around tensors: never a raw error, never other numbers, never a lost derivative."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide

X = torch.linspace(-1, 1, 2 * 3 * 6 * 6).view(2, 3, 6, 6)


class Own(Tensor):
    """A class of a user's."""


class Around(Tensor):
    """Stands for another tensor, and has no memory."""

    @staticmethod
    def __new__(cls, tensor: Tensor) -> Tensor:
        return Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype, device=tensor.device, strides=tensor.stride())

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def made(kind: str, x: Any = X, model: nn.Module | None = None) -> Callable[..., Any]:
    model = model or net()
    if kind == "step":
        return lowtide.optimize(model, (x,), loss=squares, optimizer=torch.optim.AdamW(model.parameters(), foreach=False))
    fn = lowtide.optimize(model.eval(), (x,), exact=kind == "inference")
    return fn.frozen(x) if kind == "frozen" else fn


KINDS = ("step", "inference", "generated", "frozen")


@pytest.fixture(scope="module", params=KINDS)
def called(request: Any) -> Callable[..., Any]:
    """Called some times, so that each has found its quickest way."""
    step = made(request.param)
    for _ in range(3):
        step(X)
    return step


def let_go() -> Tensor:
    tensor = X.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


OTHERS: list[tuple[Callable[[], Any], str]] = [
    (lambda: X.as_subclass(Own), r"a Own.*\.as_subclass\(torch\.Tensor\)"),
    (lambda: Around(X), r"a Around.*the plain tensor that it stands for"),
    (lambda: FakeTensorMode().from_tensor(X), "a FakeTensor"),
    (lambda: X.to_mkldnn(), "layout torch._mkldnn"),
    (lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.quint8), r"a quantized tensor.*\.dequantize\(\)"),
    (lambda: torch._to_functional_tensor(X), "a tensor within torch.func.functionalize"),
    (lambda: torch._efficientzerotensor(X.shape), "zeros without memory.*clone"),
    (let_go, "a tensor whose memory was let go"),
    (lambda: torch.nested.nested_tensor([*X]), "a nested tensor.*dense"),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:.*quantiz")
@pytest.mark.parametrize(("other", "message"), OTHERS)
def test_a_tensor_that_is_no_plain_one(called, other, message):
    with pytest.raises(lowtide.BatchError, match=message):
        called(other())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:.*quantiz")
@pytest.mark.parametrize(("other", "message"), OTHERS)
def test_it_is_not_captured_either(other, message):
    with pytest.raises(lowtide.CaptureError, match=message):
        made("inference", other())


def dual(function: Callable[..., Any]) -> Any:
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(X, X))


TRANSFORMS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda function: torch.vmap(lambda x: function(x))(torch.stack([X, X])), "called within torch.vmap"),
    (lambda function: torch.func.grad(lambda x: function(x).sum())(X), "called within torch.vmap, torch.func.grad"),
    (lambda function: torch.func.jvp(lambda x: function(x), (X,), (X,)), "called within torch.vmap"),
    (lambda function: torch.func.functionalize(lambda x: function(x))(X), "called within torch.vmap"),
    (dual, "a dual tensor of forward differentiation.*primal"),
    (lambda function: function(X.clone().requires_grad_()), r"is differentiated|requires gradients"),
    (lambda function: torch.autograd.functional.jacobian(lambda x: function(x), X), "is differentiated|requires gradients"),
]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize(("transform", "message"), TRANSFORMS)
def test_no_derivative_is_lost(called, transform, message):
    before = called(X)
    with pytest.raises(lowtide.BatchError, match=message):
        transform(called)
    assert called(X).shape == before.shape


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize(("transform", "message"), TRANSFORMS)
@pytest.mark.parametrize("kind", ["step", "inference"])
def test_nothing_is_captured_there(kind, transform, message):
    model = net()
    with pytest.raises(lowtide.LowtideError, match=message):
        transform(lambda x: made(kind, x, model)(x))


@pytest.mark.parametrize("kind", ["generated", "frozen"])
def test_what_is_made_ahead_within_a_transform_does_no_harm(kind):
    """Results are made for several calls at once, and those of a transform are wrappers."""
    step, expected = made(kind), net()(X)

    def product(w: Tensor) -> Tensor:
        return (w * step(X)).sum()

    for _ in range(12):
        step(X)
        with suppress(lowtide.BatchError):  # which is told wherever something is made
            torch.func.grad(product)(torch.ones(()))
    for _ in range(12):
        assert torch.allclose(step(X), expected, atol=1e-5)


@contextmanager
def default(setter: Callable[[Any], None], item: Any, back: Any):
    setter(item)
    try:
        yield
    finally:
        setter(back)


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Heard(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], Any]] = {
    "default_device_meta": lambda: default(torch.set_default_device, "meta", None),
    "default_device_cuda": lambda: default(torch.set_default_device, "cuda", None),
    "default_dtype": lambda: default(torch.set_default_dtype, torch.float64, torch.float32),
    "device_meta": lambda: torch.device("meta"),
    "dispatch": Seen,
    "function": Heard,
    "inference": torch.inference_mode,
}


def eager_can(kind: str, mode: str) -> None:
    if kind == "step" and "meta" in mode and torch.__version__ < "2.12":
        pytest.skip("this torch's AdamW counts its steps on the default device")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_modes_change_no_number(kind, mode):
    """Those under which the program is the same; made and called within, called outside and within again."""
    eager_can(kind, mode)
    model = net()
    losses, optimizer = [], torch.optim.AdamW(model.parameters(), foreach=False)
    if kind == "step":
        for _ in range(3):
            losses.append((loss := squares(model, X)).detach())
            loss.backward()
            optimizer.step(), optimizer.zero_grad()
    else:
        losses = [model(X)] * 3
    outside = made(kind)
    with MODES[mode]():
        within = outside if kind == "step" else None
        found = [outside(X)]
    found.append(outside(X))
    with MODES[mode]():
        found.append(outside(X))
    for one, other in zip(found, losses, strict=True):
        assert torch.equal(one, other) if within or kind == "inference" else torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["step", "generated"])
def test_modes_around_a_capture_change_no_number(kind, mode):
    eager_can(kind, mode)
    expected = made(kind)(X)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with MODES[mode]():
        if kind == "step":
            step = lowtide.optimize(model, (X,), loss=squares, optimizer=optimizer)
        else:
            step = lowtide.optimize(model.eval(), (X,), exact=False)
        found = step(X)
    assert torch.allclose(found, expected, atol=0 if kind == "step" else 1e-5, rtol=0)


def test_state_that_a_first_step_makes_in_inference_mode_can_be_trained_on():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step = lowtide.optimize(model, (X,), loss=squares, optimizer=optimizer)
    with torch.inference_mode():
        step(X)
    squares(model, X).backward()
    optimizer.step(), optimizer.zero_grad()
    step(X)


@pytest.mark.parametrize("beside", [3, None, "text", torch.ones(2).numpy()])
def test_a_generated_function_with_an_argument_that_is_no_tensor(beside):
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor, beside: Any) -> Tensor:
            return self.net(x)

    fn = lowtide.optimize(Takes().eval(), (X, beside), exact=False)
    for step in (fn, fn.frozen(X, beside)):
        for _ in range(2):
            assert torch.allclose(step(X, beside), net()(X), atol=1e-5)


def test_fake_tensor_modes_are_told():
    step = made("generated")
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(lowtide.BatchError, match=r"FakeTensorMode.*call it outside"):
        step(X)
    assert torch.allclose(step(X), net()(X), atol=1e-5)
