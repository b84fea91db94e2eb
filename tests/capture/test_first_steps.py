"""Places that a first step finds empty, or with something else than later ones; texts and tuples that grow; sums at the end of a list."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.leaving import Attributes, Net, check, square
from tests.training import differences


class Place:
    """An object with whatever it is given."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def average_by_default(place: Any, loss: Tensor) -> None:
    place.now = 0.9 * getattr(place, "now", 0.0) + 0.1 * loss.item()


def average_from_the_first(place: Any, loss: Tensor) -> None:
    if not hasattr(place, "now"):
        place.now = loss.item()
    else:
        place.now = 0.9 * place.now + 0.1 * loss.item()


def average_from_none(place: Any, loss: Tensor) -> None:
    number = loss.item()
    place.newest = number if getattr(place, "newest", None) is None else min(place.newest, number)
    place.now = place.newest


def average_of_tensors(place: Any, loss: Tensor) -> None:
    before = getattr(place, "now", None)
    place.now = loss.detach() if before is None else 0.9 * before + 0.1 * loss.detach()


def meter_of_tensors(place: Any, loss: Tensor) -> None:
    """As the meter of the examples for ImageNet: it begins with 0, and goes on with a tensor."""
    place.now = getattr(place, "now", 0) + loss.detach() * 5
    place.count = getattr(place, "count", 0) + 5
    place.mean = place.now / place.count


def text(place: Any, loss: Tensor) -> None:
    place.now = getattr(place, "now", "") + f"{loss.item():.3f}\n"


def dots(place: Any, loss: Tensor) -> None:
    place.now = getattr(place, "now", "") + "."
    place.newest = loss.item()


def pairs(place: Any, loss: Tensor) -> None:
    place.now = getattr(place, "now", ()) + (loss.item(), loss.detach(), "a")  # noqa: RUF005
    place.count = len(place.now)


KEEPS = [
    average_by_default, average_from_the_first, average_from_none, average_of_tensors, meter_of_tensors, text, dots, pairs,
]  # fmt: skip


def kept_in(made: Callable[[], Any], keep: Callable[[Any, Tensor], None]) -> Callable[[], Any]:
    def make() -> Any:
        model, place = Net(), made()
        place = place or model

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            value = square(model, x)
            keep(place if place is not model else model, value)
            return value

        return model, loss, Attributes(place, "now", "newest", "count", "mean")

    return make


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("where", ["an object", "a module"])
def test_a_place_that_begins_with_nothing(keep, where):
    check(kept_in(Place if where == "an object" else lambda: None, keep))


def from_none_in_a_list(place: list[Any], number: float) -> None:
    place[0] = number if place[0] is None else 0.9 * place[0] + 0.1 * number


def from_none_in_a_dictionary(place: dict[str, Any], number: float) -> None:
    place["best"] = number if place["best"] is None else min(place["best"], number)


def from_what_a_dictionary_may_have(place: dict[str, Any], number: float) -> None:
    before = place.get("mean")
    place["mean"] = number if before is None else 0.5 * (before + number)


NOTHING_AT_FIRST = [
    (lambda: [None], from_none_in_a_list),
    (lambda: {"best": None}, from_none_in_a_dictionary),
    (dict, from_what_a_dictionary_may_have),
    (lambda: collections.deque([None]), from_none_in_a_list),
]


@pytest.mark.parametrize(("made", "keep"), NOTHING_AT_FIRST)
@pytest.mark.parametrize("emptied", [-1, 3])
def test_an_entry_that_begins_with_nothing(made, keep, emptied):
    """Emptied between steps it begins anew."""
    found = []
    for eagerly in (True, False):
        torch.manual_seed(0)
        place, model = made(), Net()

        def loss(model: nn.Module, x: Tensor, place: Any = place) -> Tensor:
            value = square(model, x)
            keep(place, value.item())
            return value

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches, trail = [torch.rand(5, 3) for _ in range(5)], []
        step = None if eagerly else lowtide.optimize(model, batches[0], loss=loss, optimizer=optimizer)
        for at, x in enumerate(batches):
            if at == emptied:
                place.clear()
                place.update(made()) if isinstance(place, dict) else place.extend(made())
            if step is None:
                optimizer.zero_grad()
                loss(model, x).backward()
                optimizer.step()
            else:
                step(x)
            trail.append(copy.copy(place))
        found.append(trail)
    assert not differences(*found)


def mean_from_none() -> Any:
    place = {"mean": None}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        place["mean"] = value.detach() if place["mean"] is None else 0.9 * place["mean"] + 0.1 * value.detach()
        return value

    return Net(), loss, place


def test_a_tensor_in_an_entry_that_begins_with_nothing():
    check(mean_from_none)


@pytest.mark.parametrize("keep", KEEPS)
def test_a_place_that_is_emptied_between_steps_begins_anew(keep):
    found = []
    for eagerly in (True, False):
        place = Place()

        def loss(model: nn.Module, x: Tensor, place: Any = place) -> Tensor:
            value = square(model, x)
            keep(place, value)
            return value

        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [torch.rand(5, 3) for _ in range(5)]
        step = None if eagerly else lowtide.optimize(model, batches[0], loss=loss, optimizer=optimizer)
        trail = []
        for at, x in enumerate(batches):
            if at == 3:
                vars(place).clear()
            if step is None:
                optimizer.zero_grad()
                loss(model, x).backward()
                optimizer.step()
            else:
                step(x)
            trail.append({name: item.clone() if isinstance(item, Tensor) else item for name, item in vars(place).items()})
        found.append([dict(sorted(each.items())) for each in trail])
    assert not differences(*found)


def at_the_end() -> Any:
    sums, rows, named, counts = [1.0, 0.0], [[0.0, 0]], [{"loss": 0.0}], collections.Counter[str]()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        sums[-1] += value.item()
        sums[-2] = max(sums[-2], value.item())
        rows[-1][0] += value.item()
        rows[-1][1] += 1
        named[-1]["loss"] += value.item()
        counts["loss"] += value.item()
        return value

    return Net(), loss, [sums, rows, named, counts]


def appended_and_summed() -> Any:
    sums = list[float]()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        sums.append(0.0)
        sums[-1] += value.item()
        return value

    return Net(), loss, sums


@pytest.mark.parametrize("make", [at_the_end, appended_and_summed])
def test_sums_at_the_end_of_a_list(make):
    check(make)


def test_the_end_of_a_list_is_where_it_ends_in_that_step():
    sums, model = [0.0], Net()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        sums[-1] += value.item()
        return value

    step = lowtide.optimize(model, torch.rand(5, 3), loss=loss, optimizer=torch.optim.SGD(model.parameters()))
    losses = []
    for at in range(4):
        if at == 2:
            sums.append(0.0)
        losses.append(step(torch.rand(5, 3)).item())
    assert sums == [losses[0] + losses[1], losses[2] + losses[3]]


@pytest.mark.parametrize("keys", [(-1, 1), (1, -1)])
def test_one_item_by_two_positions_is_refused(keys):
    """They are one item only for as long as the list has that length."""
    sums = [0.0, 0.0]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        for key in keys:
            sums[key] += value.item()
        return value

    model = Net()
    with pytest.raises(lowtide.CaptureError, match="reads what other steps leave in a list"):
        lowtide.optimize(model, torch.rand(5, 3), loss=loss, optimizer=torch.optim.SGD(model.parameters()))
    assert sums == [0.0, 0.0]
