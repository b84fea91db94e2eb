"""Parameters of a class of their own, which lie in plain memory: with attributes and methods, as weights in 4 bits are kept."""

from __future__ import annotations

from contextlib import suppress
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


aten = torch.ops.aten


class Coded(Tensor):
    """Bytes and what a unit of each row is worth: made of plain tensors, and says so."""

    codes: Tensor
    scale: Tensor
    turned: bool

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, turned: bool = False) -> Coded:
        shape = codes.shape[::-1] if turned else codes.shape
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype, device=codes.device)
        self.codes, self.scale, self.turned = codes, scale, turned
        return self

    @classmethod
    def of(cls, weight: Tensor) -> Coded:
        scale = weight.abs().amax(1, keepdim=True) / 100
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.turned

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], turned: bool, size: Any, stride: Any) -> Coded:
        return cls(parts["codes"], parts["scale"], turned)

    def dequantize(self) -> Tensor:
        plain = self.codes.to(self.scale.dtype) * self.scale
        return plain.t() if self.turned else plain

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.t.default:
            return cls(args[0].codes, args[0].scale, not args[0].turned)
        if func is aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].turned)
        if func is aten.copy_.default and isinstance(args[0], Coded):
            other = args[1] if isinstance(args[1], Coded) else cls.of(args[1])
            args[0].codes.copy_(other.codes)
            args[0].scale.copy_(other.scale)
            return args[0]
        plain = [each.dequantize() if isinstance(each, Coded) else each for each in args]
        return func(*plain, **(kwargs or {}))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.low, self.high = nn.Linear(6, 5), nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False)
        self.base.weight = nn.Parameter(Coded.of(self.base.weight.detach()), requires_grad=False)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.base.weight, Coded)
        hidden: Tensor = self.last(torch.tanh(self.base(x) + self.high(self.low(x))))
        return hidden


class KeepsCodes(torch.optim.Optimizer):
    """Keeps its averages in bytes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                rows = parameter.grad.reshape(len(parameter), -1)
                if not state:
                    state["step"], state["average"] = (
                        torch.tensor(0.0),
                        Coded(torch.zeros_like(rows, dtype=torch.int8), rows[:, :1] * 0 + 1),
                    )
                state["step"] += 1
                average = state["average"].dequantize().lerp(rows, 0.1)
                state["average"].copy_(average)
                parameter.sub_(average.reshape(parameter.shape), alpha=group["lr"])


@pytest.mark.filterwarnings("ignore:the optimizer does not hold 3 parameters")
@pytest.mark.parametrize("optimizer", [trained, lambda model: KeepsCodes(model.last.parameters())])
def test_training_beside_weights_that_are_made_of_tensors(optimizer: Any):
    model, twin = Adapted(), Adapted()
    x, mine, its = torch.randn(4, 6), optimizer(model), optimizer(twin)
    step = lowtide.optimize(model, x, loss=square, optimizer=mine, planning=lowtide.Planning(workspaces=False))
    for number in range(5):
        if number == 3:  # is read where it lies then
            for each in (model, twin):
                each.base.weight.scale = each.base.weight.scale * 2  # type: ignore[attr-defined, operator]
        its.zero_grad()
        loss = square(twin, x)
        loss.backward()
        its.step()
        assert torch.equal(step(x), loss)
    for here, there in zip(mine.state.values(), its.state.values(), strict=True):
        for key, item in there.items():
            assert type(item) is type(here[key])
            plain = [each.dequantize() if isinstance(each, Coded) else each for each in (item, here[key])]
            assert torch.equal(*plain)


def test_inference_with_weights_that_are_made_of_tensors():
    model, x = Adapted().eval(), torch.randn(4, 6)
    function = lowtide.optimize(model, x)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(function(x), model(x))
        model.base.weight.codes.zero_()  # type: ignore[union-attr, operator]
        assert torch.equal(function(x), model(x))


def test_one_that_is_made_of_tensors_and_trained_is_refused():
    model = Adapted()
    model.base.weight.requires_grad_()
    with pytest.raises(lowtide.CaptureError, match=r"base\.weight is a Coded; plain tensors .* and frozen ones that are made of such"):
        lowtide.optimize(model, torch.randn(4, 6))


def test_one_that_stands_for_another_tensor_is_refused():
    model = nn.Linear(6, 5)
    model.weight = nn.Parameter(Wrapped(model.weight.detach()), requires_grad=False)
    with pytest.raises(lowtide.CaptureError, match="weight is a Wrapped; plain tensors and parameters can be captured"):
        lowtide.optimize(model, torch.randn(4, 6))


class Units:
    """What a library keeps beside its weights."""

    def __init__(self) -> None:
        self.scale, self.second, self.is_nested = torch.full((5, 1), 0.01), torch.full((5, 1), 0.01), True


class Lazy(nn.Module):
    """Unpacks its units in its first call, in an object that the weight, or the module, has."""

    def __init__(self, *, of_weight: bool, deletes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.of_weight, self.deletes = Packed(torch.randn(5, 6)), of_weight, deletes
        (self.weight if of_weight else self).units = Units()  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        units = (self.weight if self.of_weight else self).units  # type: ignore[attr-defined]
        if units.is_nested:
            units.scale, units.is_nested = units.scale + units.second, False
            if self.deletes:
                del units.second
        return nn.functional.linear(x, self.weight.unpacked() * units.scale)


@pytest.mark.parametrize("of_weight", [True, False])
@pytest.mark.parametrize("deletes", [True, False])
def test_what_a_first_call_changes_is_as_it_was(of_weight: bool, deletes: bool):
    model, twin, x = Lazy(of_weight=of_weight, deletes=deletes), Lazy(of_weight=of_weight, deletes=deletes), torch.randn(4, 6)
    units = (model.weight if of_weight else model).units  # type: ignore[attr-defined]
    before = dict(vars(units))
    with torch.no_grad(), suppress(lowtide.CaptureError):
        function = lowtide.optimize(model, x)
        assert torch.equal(function(x), twin(x))
        return
    assert of_weight or deletes
    assert {name: id(item) for name, item in vars(units).items()} == {name: id(item) for name, item in before.items()}
    with torch.no_grad():
        assert torch.equal(model(x), twin(x))  # once before
        function = lowtide.optimize(model, x)
        assert torch.equal(function(x), twin(x))


def test_another_parameter_of_the_class_has_attributes_of_its_own():
    model, twin, x = Layer(), Layer(), torch.randn(4, 6)
    optimizer = trained(twin)
    step = lowtide.optimize(model, x, loss=square, optimizer=trained(model), planning=lowtide.Planning(workspaces=False))
    function = lowtide.optimize(model, x)
    for number in range(4):
        if number == 2:
            for each in (model, twin):
                torch.manual_seed(1)
                each.base.weight = Packed(torch.randn(5, 6))
                each.base.weight.scale = 0.03
        optimizer.zero_grad()
        with torch.no_grad():
            assert torch.equal(function(x), twin(x))
        loss = square(twin, x)
        loss.backward()
        optimizer.step()
        assert torch.equal(step(x), loss)


def test_other_tensors_within_one_are_read_by_the_next_call():
    model, x = Adapted().eval(), torch.randn(4, 6)
    for exact in (True, False):
        function = lowtide.optimize(model, x, exact=exact)
        with torch.no_grad():
            for _ in range(3):
                function(x)
            model.base.weight.scale = model.base.weight.scale * 2  # type: ignore[assignment, operator]
            for _ in range(2):
                torch.testing.assert_close(function(x), model(x))


class Counts(nn.Module):
    """Sets something of its weight in each forward pass."""

    def __init__(self, kind: Any, sets: Any) -> None:
        super().__init__()
        self.weight, self.sets = kind(torch.ones(5, 6)), sets
        self.weight.count, self.weight.counts = 0, {"k": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.sets(self.weight)
        assert self.weight.__class__ in (Named, nn.Parameter)
        assert not isinstance(self.weight, Named) or self.weight.__class__ is Named
        return nn.functional.linear(x, self.weight) / (1 + self.weight.count + self.weight.counts["k"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [nn.Parameter, Named])
@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (lambda weight: setattr(weight, "count", weight.count + 1), "sets attribute 'count' of a tensor"),
        (lambda weight: setattr(weight, "last", weight.sum()), "sets attribute 'last' of a tensor"),
        (lambda weight: weight.counts.update(k=weight.counts["k"] + 1), "changes 'k' in a dict that a parameter has"),
    ],
)
def test_what_a_program_sets_of_a_parameter_is_refused(kind: Any, sets: Any, message: str):
    model = Counts(kind, sets)
    optimizer = torch.optim.SGD([model.weight], 0.1)
    with pytest.raises(lowtide.CaptureError, match=message):
        lowtide.optimize(model, torch.randn(4, 6), loss=square, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
    assert (model.weight.count, model.weight.counts) == (0, {"k": 0})
    assert not hasattr(model.weight, "last")
