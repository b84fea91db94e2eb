"""Which lists, dictionaries and objects are one: what a program puts into two places, or returns, is as eager PyTorch has it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import lowtide

NAMES = ["outside"]


class Note:
    """An object of the user's."""


class Keeps(nn.Module):
    """Puts what a function makes of its output into attributes, and returns a dictionary."""

    def __init__(self, put: Callable[[Any, Tensor, dict[str, Any]], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.put = put
        self.first = self.second = None
        self.history: list[Any] = []
        self.others: list[Any] = []
        self.table: dict[str, Any] = {}
        self.names = ["inside"]
        self.nested = {"deep": {"names": [1]}}
        self.tensors = [torch.ones(2)]

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        result = {"y": y, "of": {"z": y.detach() + 1}}
        self.put(self, y.detach(), result)
        return result


def two_attributes(model: Any, y: Tensor, result: dict[str, Any]) -> None:
    model.first = model.second = {"y": y}


def within_a_tuple(model: Any, y: Tensor, result: dict[str, Any]) -> None:
    model.first = (1, new := {"y": y})
    model.second = new


def twice_within_one(model: Any, y: Tensor, result: dict[str, Any]) -> None:
    new = [y]
    model.first = {"one": new, "other": new}


def within_two(model: Any, y: Tensor, result: dict[str, Any]) -> None:
    new = [y]
    model.first, model.second = {"one": new}, {"other": new}


def an_object(model: Any, y: Tensor, result: dict[str, Any]) -> None:
    new = Note()
    new.y = y  # type: ignore[attr-defined]
    model.first, model.second = new, [new]


def two_lists(model: Any, y: Tensor, result: dict[str, Any]) -> None:
    new = {"y": y.sum().item(), "tensor": y}
    model.history.append(new)
    model.others.append(new)


def a_list_and_an_attribute(model: Any, y: Tensor, result: dict[str, Any]) -> None:
    new = {"y": y}
    model.history.append(new)
    model.table["last"] = model.first = new


def the_callers_own(model: Any, y: Tensor, result: dict[str, Any]) -> None:
    model.first = {"y": y, "names": model.names, "outside": NAMES, "tensors": model.tensors}


def returned_twice(model: Any, y: Tensor, result: dict[str, Any]) -> None:
    result["again"] = [result["of"], result["of"]]


def the_callers_own_returned(model: Any, y: Tensor, result: dict[str, Any]) -> None:
    result |= {"names": model.names, "outside": NAMES, "deep": model.nested["deep"]["names"]}


def returned_and_put(model: Any, y: Tensor, result: dict[str, Any]) -> None:
    model.first = result["of"]


PUTS = [
    two_attributes, within_a_tuple, twice_within_one, within_two, an_object, two_lists, a_list_and_an_attribute, the_callers_own,
    returned_twice, the_callers_own_returned,
]  # fmt: skip


def containers(item: Any, at: str) -> Iterator[tuple[int, str]]:
    """By id, and where, written as one would: a tuple is as good as another, what it holds is not."""
    if isinstance(item, (list, dict, Note)):
        yield id(item), at
    entries = item if isinstance(item, dict) else vars(item) if isinstance(item, Note) else {}
    for key, each in (*entries.items(), *(enumerate(item) if isinstance(item, (list, tuple)) else ())):
        yield from containers(each, f"{at}.{key}")


def shared(model: Keeps, result: dict[str, Any]) -> list[list[str]]:
    """Where the same container lies, for each."""
    places = dict[int, list[str]]()
    everything = {name: vars(model)[name] for name in ("first", "second", "history", "others", "table", "names", "nested", "tensors")}
    for at, where in containers({**everything, "result": result, "outside": NAMES}, ""):
        places.setdefault(at, []).append(where)
    return sorted(places.values())


@pytest.mark.parametrize("put", [*PUTS, returned_and_put])
def test_what_is_one_in_eager_is_one_after_each_call(put):
    model, x = Keeps(put), torch.arange(6.0).reshape(2, 3)
    eager, step = copy.deepcopy(model), lowtide.optimize(model, (x,))
    for number in range(3):
        result, expected = step(x + number), eager(x + number)
        assert shared(model, result) == shared(eager, expected)


@pytest.mark.parametrize("put", PUTS)
def test_what_is_one_in_eager_is_one_after_each_training_step(put):
    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        result = model(x)
        return result["y"].square().mean(), result

    model, x = Keeps(put), torch.arange(6.0).reshape(2, 3)
    eager = copy.deepcopy(model)
    step = lowtide.optimize(model, (x,), loss=loss, optimizer=optim.SGD(model.parameters(), lr=0.1))
    optimizer = optim.SGD(eager.parameters(), lr=0.1)
    for number in range(3):
        _, result = step(x + number)
        value, expected = loss(eager, x + number)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert shared(model, result) == shared(eager, expected)
        assert torch.equal(model.linear.weight, eager.linear.weight)


def test_what_the_caller_does_with_a_list_of_its_own_shows_in_what_was_returned():
    model, x = Keeps(the_callers_own_returned), torch.ones(2, 3)
    step = lowtide.optimize(model, (x,))
    result = step(x)
    model.names.append("later")
    assert result["names"] == ["inside", "later"]
    assert step(x)["names"] is model.names


def test_each_call_makes_containers_of_its_own():
    model, x = Keeps(two_attributes), torch.ones(2, 3)
    step = lowtide.optimize(model, (x,))
    results, kept = [], []
    for _ in range(2):
        results.append(step(x))
        kept.append(model.first)
    assert results[0]["of"] is not results[1]["of"]
    assert kept[0] is not kept[1]
