"""What functions of a class read that Python itself calls, what containers of a class have as attributes, properties that are set.

And variables of objects that each step counts in: where another object is put there, it is the one that is read and counted in.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

import lowtide
from tests.leaving import Attributes, Meter, Net, check, square
from tests.reads import Case, are_alike

RATE = 1.0


def _set_rate(rate: float) -> None:
    globals()["RATE"] = rate


class _Cached:
    @functools.cached_property
    def rate(self) -> float:
        return RATE


class _SetByProperty:
    def _put(self, number: float) -> None:
        self.rate = number * RATE

    number = property(None, _put)


class _Factor:
    def __set__(self, item: Any, number: float) -> None:
        item.rate = number * RATE


class _SetByDescriptor:
    number = _Factor()


class _SetByItself:
    def __setattr__(self, name: str, number: float) -> None:
        object.__setattr__(self, "rate", number * RATE)


class _Row(NamedTuple):
    first: float = 1.0

    def scaled(self) -> float:
        return self.first * RATE


class _Words(dict[str, float]):
    def scaled(self) -> float:
        return RATE


def _setting(item: Any) -> Callable[[], float]:
    def read() -> float:
        item.number = 1.0
        return float(item.rate)

    return read


READERS: dict[str, Callable[[], Callable[[], float]]] = {
    "cached property": lambda: lambda: _Cached().rate,
    "setter of a property": lambda: _setting(_SetByProperty()),
    "setter of a descriptor": lambda: _setting(_SetByDescriptor()),
    "__setattr__": lambda: _setting(_SetByItself()),
    "method of a named tuple in a list": lambda: functools.partial(lambda rows: rows[0].scaled(), [_Row()]),
    "method of a dictionary": lambda: functools.partial(lambda words: words.scaled(), _Words()),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_functions_of_a_class_read_is_noticed(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> tuple[nn.Module, Callable[[], float], Callable[[], Any]]:
        monkeypatch.setitem(globals(), "RATE", 1.0)
        return nn.Linear(3, 2), READERS[reader](), lambda: _set_rate(3.0)

    are_alike(made, announced=False)


class _Numbers(list[float]):
    rate = 1.0


class _Pair(tuple[float, ...]):
    rate = 1.0


class _Array(np.ndarray):
    rate = 1.0


@pytest.mark.parametrize("make", [_Numbers, _Words, _Pair, lambda: np.ones(2).view(_Array)])
def test_an_attribute_of_a_container_is_noticed(make: Callable[[], Any]) -> None:
    def made() -> tuple[nn.Module, Callable[[], float], Callable[[], Any]]:
        held: Any = make()
        held.rate = 2.0
        read, change = (lambda: held.rate), (lambda: setattr(held, "rate", 3.0))
        case: Case = read, change
        return nn.Linear(3, 2), *case

    are_alike(made, announced=False)


class _Watched:
    """Sums by a property that is set, and keeps by a descriptor."""

    def __init__(self) -> None:
        self.total, self.calls = 0.0, 0

    @property
    def value(self) -> float:
        return self.total / max(1, self.calls)

    @value.setter
    def value(self, number: float) -> None:
        self.total += number
        self.calls += 1


class _Kept:
    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, item: Any, owner: type) -> Any:
        return getattr(item, self.name, None)

    def __set__(self, item: Any, value: Any) -> None:
        setattr(item, self.name, value)


class _Keeping:
    last, size, kind = _Kept(), _Kept(), _Kept()


def test_a_property_that_is_set_sums_up() -> None:
    def make() -> tuple[Net, Callable[[nn.Module, Tensor], Tensor], Any]:
        watched = _Watched()

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            result = square(model, x)
            watched.value = result.item()
            return result

        return Net(), loss, Attributes(watched, "total", "calls")

    check(make)


def test_what_a_descriptor_keeps_is_put_there() -> None:
    def make() -> tuple[Net, Callable[[nn.Module, Tensor], Tensor], Any]:
        keeping = _Keeping()

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            result = square(model, x)
            keeping.last, keeping.size, keeping.kind = result.detach(), len(x), "train"
            return result

        return Net(), loss, Attributes(keeping, "_last", "_size", "_kind")

    check(make)


@pytest.mark.parametrize("counted", ["number", "count"])
def test_another_object_is_put_in_the_place_of_one_that_is_counted_in(counted: str) -> None:
    """As a loop does that makes a new meter for each epoch."""

    def trained(eagerly: bool) -> list[Any]:
        torch.manual_seed(0)
        model, meter, meters = Net(), Meter(), list[Meter]()
        meter.last, meter.rate = 0.0, 1.0

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            result = square(model, x) * meter.rate
            meter.last += result.item() if counted == "number" else 1
            return result

        optimizer, x = optim.SGD(model.parameters(), lr=0.1), torch.rand(5, 3)

        def by_eager(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            result = loss(model, x)
            result.backward()
            optimizer.step()
            return result.detach()

        run, planning = lowtide.Run(check="never"), lowtide.Planning(workspaces=False)
        step = by_eager if eagerly else lowtide.optimize(model, (x,), loss=loss, optimizer=optimizer, run=run, planning=planning)
        results = []
        for epoch in range(3):
            meters.append(meter := Meter())
            meter.last, meter.rate = 0.0, epoch + 1.0
            results += [step(x).tolist(), step(x).tolist()]
        return [results, [each.last for each in meters]]

    assert trained(eagerly=False) == trained(eagerly=True)
