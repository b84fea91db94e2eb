"""What a program learns by asking for the class of a thing that something else stands for while it is captured."""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.leaving import Meter, Net, check, square

Ask = Callable[[Any, Any, nn.Module, Meter], object]


def of_a_number(loss: Tensor, x: Tensor, model: nn.Module, meter: Meter) -> object:
    value = loss.item()
    return (
        ["is"] * (type(value) is float)
        + ["in"] * (type(value) in (int, float))
        + [type(value).__name__, type(value)(3), {float: 1}[type(value)]]
    )


def of_a_whole_number(loss: Tensor, x: Tensor, model: nn.Module, meter: Meter) -> object:
    return [type((loss > 0).sum().item()) is int, issubclass(type(loss.item()), float), loss.item().__class__ in {float}]


def of_a_text(loss: Tensor, x: Tensor, model: nn.Module, meter: Meter) -> object:
    return [type(f"{loss.item():.2f}") is str, type(loss.item() + 1) is float]


def of_tensors(loss: Tensor, x: Tensor, model: nn.Module, meter: Meter) -> object:
    weight: Any = next(model.parameters())
    return [type(x) is Tensor, type(loss) is torch.Tensor, weight.__class__ is nn.Parameter, type(weight.detach()).__name__, f"{type(x)}"]


def of_containers(loss: Tensor, x: Tensor, model: nn.Module, meter: Meter) -> object:
    return [type(meter.seen) is list, type(meter.seen).__name__, meter.seen.__class__ is list]


def by_attributes(loss: Tensor, x: Tensor, model: nn.Module, meter: Meter) -> object:
    value = loss.item()
    return [hasattr(value, name) for name in ("value", "kind", "item", "text", "real_part", "update", "__len__", "__float__")]


def within_a_function(loss: Tensor, x: Tensor, model: nn.Module, meter: Meter) -> object:
    def name_of(type: Callable[[Any], Any]) -> Any:
        return type(loss.item() * 0 + 1)  # a name of its own, not Python's

    return [[type(each).__name__ for each in (loss.item(), x)], (lambda each: type(each))(x), name_of(lambda each: "own")]


def by_functions_that_ask(loss: Tensor, x: Tensor, model: nn.Module, meter: Meter) -> object:
    things = [loss.item(), 1, 0.5]
    groups = [(kind.__name__, len([*each])) for kind, each in itertools.groupby(things, key=type)]
    ask = functools.partial(lambda kind, item: kind(item) is float, type)
    return [groups, [*map(ask, things)], [*filter(type, things[1:])], [*map(type, things)] == [float, int, float]]


def by_a_name_of_its_own(loss: Tensor, x: Tensor, model: nn.Module, meter: Meter) -> object:
    def ordered(items: list[Any], type: Callable[[Any], Any]) -> list[Any]:
        key = type
        return [*sorted(items, key=type), key(items[0])]

    return ordered([3, 1, 2], lambda item: -item)


class Asking:
    @property
    def of_property(self) -> str:
        return type(self.weight).__name__

    @staticmethod
    def of_static(item: Any) -> bool:
        return type(item) is Tensor

    @classmethod
    def of_class(cls, item: Any) -> str:
        return item.__class__.__name__

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


@torch.no_grad()
def within_a_decorator(loss: Tensor, x: Tensor, model: nn.Module, meter: Meter) -> object:
    asking = Asking(next(model.parameters()))
    return [asking.of_property, Asking.of_static(x), Asking.of_class(loss), type(x) is Tensor]


@pytest.mark.parametrize(
    "ask",
    [
        of_a_number,
        of_a_whole_number,
        of_a_text,
        of_tensors,
        of_containers,
        by_attributes,
        by_functions_that_ask,
        by_a_name_of_its_own,
        within_a_function,
        within_a_decorator,
    ],
)
def test_things_have_the_classes_that_they_have_elsewhere(ask):
    check(keeping(ask))


def keeping(ask: Ask) -> Callable[[], Any]:
    def make() -> Any:
        meter = Meter()

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            value = square(model, x)
            meter.seen.append((value.item(), ask(value, x, model, meter)))
            return value

        return Net(), loss, meter

    return make


def test_a_branch_by_the_class_of_a_tensor_is_that_of_eager(monkeypatch):
    """Also in a function of another of the user's modules."""
    source = "import torch\n\ndef doubled(x):\n    return x * 2 if type(x) is torch.Tensor else x\n"
    import linecache

    helpers = types.ModuleType("helpers")
    helpers.__file__ = __file__.replace("test_classes", "helpers")
    linecache.cache[helpers.__file__] = len(source), None, source.splitlines(keepends=True), helpers.__file__
    exec(compile(source, helpers.__file__, "exec", dont_inherit=True), vars(helpers))
    monkeypatch.setitem(sys.modules, "helpers", helpers)
    monkeypatch.setitem(globals(), "helpers", helpers)
    code = helpers.doubled.__code__
    check(lambda: (Net(), through_a_module, Meter()))
    assert helpers.doubled.__code__ is code


def through_a_module(model: nn.Module, x: Tensor) -> Tensor:
    return square(model, helpers.doubled(x))  # type: ignore[name-defined]  # noqa: F821
