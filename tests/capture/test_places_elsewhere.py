"""What another thread finds, while a step is captured, in the places that the step sums up in or sets."""

from __future__ import annotations

import copy
import math
import operator
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from tests.leaving import Meter, Net, check, square

total = 0.5
last: Any = None
HERE = sys.modules[__name__]
LAST = operator.attrgetter("last")  # which names no variable
found: list[Any] = []  # by other threads


def elsewhere(work: Callable[[], Any]) -> None:
    def run() -> None:
        try:
            finds.put(work())
        except Exception as error:
            finds.put(repr(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


class Finds:
    """Told by other threads alone: nothing that a program does."""

    @staticmethod
    def put(item: Any) -> None:
        sys.modules[__name__].__dict__["found"].append(item)


finds = Finds()


def looks_at(number: float) -> list[Any]:
    texts = [f"{number:.2f}", "%.1f" % number, str(number), repr([number])]  # noqa: UP031
    known = [number + 1, 2 * number, number**2, -number, number < 5, number == 0.5, hash(number), number.is_integer(), bool(number)]
    return [
        *texts,
        *known,
        int(number),
        round(number, 1),
        math.floor(number),
        copy.copy(number),
        isinstance(number, float),
        max(number, 0) + 0,
    ]


def in_a_global(model: nn.Module, x: Tensor) -> Tensor:
    global total
    loss = square(model, x)
    elsewhere(lambda: looks_at(total))
    total += loss.item()
    return loss


def in_an_object(meter: Meter) -> Callable[..., Tensor]:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        elsewhere(lambda: looks_at(meter.total))
        meter.total += value.item()
        return value

    meter.total = 0.5
    return loss


def in_a_dictionary(meter: Meter) -> Callable[..., Tensor]:
    totals = {"loss": 0.5}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        elsewhere(lambda: looks_at(totals["loss"]))
        totals["loss"] += value.item()
        return value

    return loss


def of_a_function(meter: Meter) -> Callable[..., Tensor]:
    sum_of_all = 0.5

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal sum_of_all
        value = square(model, x)
        elsewhere(lambda: looks_at(sum_of_all))
        sum_of_all += value.item()
        return value

    return loss


@pytest.mark.parametrize("made", [lambda meter: in_a_global, in_an_object, in_a_dictionary, of_a_function])
def test_another_thread_finds_the_number_that_was_there(made, monkeypatch):
    def make() -> Any:
        found.clear()
        vars(HERE)["total"] = 0.5
        meter = Meter()
        return Net(), made(meter), Meter()

    for name, item in (("total", 0.5), ("found", [])):
        monkeypatch.setattr(HERE, name, item)
    check(make)
    assert found
    assert found[0] == looks_at(0.5)
    assert not [each for each in found if isinstance(each, str)]


def sets_a_global(model: nn.Module, x: Tensor) -> Tensor:
    global last
    loss = square(model, x)
    elsewhere(lambda: type(LAST(HERE)).__name__)
    last = loss.detach()
    return loss


def test_another_thread_finds_a_variable_that_the_step_only_sets(monkeypatch):
    monkeypatch.setattr(HERE, "last", None)
    monkeypatch.setattr(HERE, "found", [])
    check(lambda: (Net(), sets_a_global, Meter()))
    assert {*found} == {"NoneType", "Tensor"}
    assert isinstance(last, Tensor)
