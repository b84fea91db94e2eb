"""Numbers that differ from call to call, in attributes, variables and objects that modules hold: inputs of the step after a while."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import lowtide
from tests.leaving import Meter, Net, plainly, square
from tests.training import differences


class Schedule:
    """As losses and forwards ask for a weight."""

    def __init__(self) -> None:
        self.calls, self.end = 0, 10

    def weight(self) -> float:
        return 0.5 + 0.5 * min(self.calls / self.end, 1.0)


class Scheduled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.schedule, self.scale = Schedule(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.schedule.weight()


SETTINGS: dict[str, Any] = {}


def helped(weight: float, **others: Any) -> float:
    return weight


Case = tuple[nn.Module, Callable[..., Any], Callable[[int], object], Any]


def in_an_object() -> Case:
    schedule = Schedule()
    return Net(), lambda model, x: square(model, x) * schedule.weight(), lambda at: setattr(schedule, "calls", at), schedule


def in_an_object_of_a_module() -> Case:
    model = Scheduled()
    return model, square, lambda at: setattr(model.schedule, "calls", at), model.schedule


def in_a_module() -> Case:
    model = Scheduled()
    return model, lambda model, x: square(model, x) / (1 + model.scale), lambda at: setattr(model, "scale", 0.1 * at), None


def in_a_variable() -> Case:
    weight = 1.0

    def between(at: int) -> None:
        nonlocal weight
        weight *= 0.5

    return Net(), lambda model, x: square(model, x) * weight, between, None


def counted_in_an_object_of_a_module() -> Case:
    model = Scheduled()

    def loss(model: Any, x: Tensor) -> Tensor:
        model.schedule.calls += 1
        return square(model, x) / model.schedule.calls

    return model, loss, lambda at: None, model.schedule


def counted_in_a_module() -> Case:
    model = Scheduled()
    model.calls, model.log = 0, [0]

    def loss(model: Any, x: Tensor) -> Tensor:
        model.calls += 1
        model.log[0] += 1
        return square(model, x) * model.calls / model.log[0]

    return model, loss, lambda at: None, model


def counted_beside_others() -> Case:
    counts: dict[str, Any] = {"calls": 0, "weight": 1.0, "ends": [0, 2.0]}

    def loss(model: Any, x: Tensor) -> Tensor:
        counts["calls"] += 1
        counts["ends"][0] += 1
        return square(model, x) * counts["weight"] / counts["ends"][1]

    return Net(), loss, lambda at: counts.update(weight=1.0 + at // 3), counts


def metered_in_a_module() -> Case:
    model = Net()
    model.meters = {"loss": Meter()}

    def loss(model: Any, x: Tensor) -> Tensor:
        value = square(model, x)
        model.meters["loss"].update(value.item(), len(x))
        return value

    return model, loss, lambda at: None, model.meters


# How a loss may ask for a number in a dictionary or a list, and what else of it.
ASKED: dict[str, Callable[[Any], float]] = {
    "by key": lambda settings: settings["weight"],
    "with a default": lambda settings: settings.get("weight", 1.0),
    "and there": lambda settings: settings.setdefault("weight", 1.0),
    "as an argument": lambda settings: helped(**settings),
    "in a copy": lambda settings: copy.deepcopy(settings)["weight"],
    "in another": lambda settings: {**settings, "name": "else"}["weight"],
    "of all": lambda settings: sum(value for value in settings.values() if isinstance(value, float)),
    "by items": lambda settings: next(value for key, value in settings.items() if key == "weight"),
    "in a text": lambda settings: float(str(settings["weight"])),
    "as a tensor": lambda settings: torch.tensor([settings["weight"], 1.0])[0],  # type: ignore[dict-item, return-value]
    "rounded": lambda settings: round(settings["weight"], 1) + int(settings["weight"]),
    "in a list": lambda settings: settings["list"][0],
    "at the end of a list": lambda settings: settings["list"][-1],
    "of a whole list": lambda settings: sum(settings["list"]),
    "of a list by map": lambda settings: next(map(float, settings["list"])),
    "of a list apart": lambda settings: [2.0, *settings["list"]][1] * len(settings["list"]),
    "nested": lambda settings: settings["more"]["weight"],
    "of each": lambda settings: sum(each["weight"] * factor for each, factor in zip(settings["terms"], (1.0, 2.0), strict=True)),
    "of pairs": lambda settings: sum(one * two for one, two in settings["pairs"]),
    "the same": lambda settings: settings["weight"] if settings["weight"] is settings["twin"] else 9.0,
    "decided": lambda settings: 2.0 if settings["weight"] > 0.3 else 1.0,
    "beside": lambda settings: len(settings["name"]),
}


def settings_at(at: int) -> dict[str, Any]:
    weight = 0.1 + 0.1 * at
    terms: dict[str, Any] = {"terms": [{"weight": weight}, {"weight": 2.0}], "pairs": [[weight, 2.0]]}
    return {"weight": weight, "twin": weight, "step": at, "list": [0.2 * at, 1.0], "more": {"weight": 0.5**at}, "name": "some", **terms}


def in_settings(ask: Callable[[Any], float], where: str) -> Case:
    schedule, model = Schedule(), Scheduled()
    settings = SETTINGS if where == "a global" else {}
    settings.clear()
    settings.update(settings_at(0))
    schedule.settings = model.settings = settings  # type: ignore[attr-defined, assignment]

    def between(at: int) -> None:
        new = settings_at(at)
        settings.update(weight=new["weight"], twin=new["twin"], step=new["step"])
        settings["terms"][0]["weight"] = settings["pairs"][0][0] = new["weight"]
        settings["list"][0] = new["list"][0]
        settings["more"]["weight"] = new["more"]["weight"]

    losses: dict[str, Callable[..., Any]] = {
        "a global": lambda model, x: square(model, x) * ask(SETTINGS),
        "a module": lambda model, x: square(model, x) * ask(model.settings),
        "an object": lambda model, x: square(model, x) * ask(schedule.settings),  # type: ignore[attr-defined]
    }
    return model, losses[where], between, settings


def trail(make: Callable[[], Case], *, eagerly: bool) -> list[Any]:
    torch.manual_seed(0)
    model, loss, between, place = make()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.rand(5, 3) for _ in range(7)]
    step = None if eagerly else lowtide.optimize(model, batches[0], loss=loss, optimizer=optimizer)
    left: list[Any] = []
    for at, x in enumerate(batches):
        between(at)
        if step is None:
            optimizer.zero_grad()
            value = loss(model, x)
            value.backward()
            optimizer.step()
        else:
            value = step(x)
        left.append([plainly(value), plainly(place if isinstance(place, dict) else getattr(place, "calls", None))])
    return [*left, model.state_dict()]


CASES = [
    in_an_object,
    in_an_object_of_a_module,
    in_a_module,
    in_a_variable,
    counted_in_an_object_of_a_module,
    counted_in_a_module,
    counted_beside_others,
    metered_in_a_module,
]


@pytest.mark.parametrize("make", CASES)
def test_a_number_of_each_call_is_computed_with_by_one_program(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that calls are captured anew, again and again
        found = differences(trail(make, eagerly=True), trail(make, eagerly=False))
    assert not found, "\n".join(found)


def test_a_program_is_looked_at_again_with_the_inputs_that_it_has():
    """Another shape's program has made a number an input by then, and this one has it as it was."""
    schedule, model = Schedule(), Net()
    options = {"run": lowtide.Run(check="always"), "optimizer": optim.SGD(model.parameters(), lr=0.1)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = lowtide.optimize(model, torch.rand(5, 3), loss=lambda model, x: square(model, x) * schedule.weight(), **options)
        for calls, rows in ((0, 5), (0, 2), (7, 5), (8, 2), (7, 5)):
            schedule.calls = calls
            step(torch.rand(rows, 3))


def elsewhere(ask: Callable[[], float]) -> float:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(ask).result()


def in_another_thread() -> Case:
    schedule, counts = Schedule(), {"weight": 1.0}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        calls = schedule.calls + elsewhere(lambda: 1.0 + schedule.calls)
        return square(model, x) * counts["weight"] * elsewhere(lambda: counts["weight"]) * calls

    return Net(), loss, lambda at: (counts.update(weight=float(at)), setattr(schedule, "calls", at)), counts


def decided() -> Case:
    schedule = Schedule()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return square(model, x) * (2 if schedule.calls % 2 else 1)

    return Net(), loss, lambda at: setattr(schedule, "calls", at), schedule


def of_another_kind() -> Case:
    schedule = Schedule()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return square(model, x) if schedule.end is None else square(model, x) * schedule.end

    return Net(), loss, lambda at: setattr(schedule, "end", [1, 2, 3.5, 4, None, 6, 7.5][at]), schedule


@pytest.mark.parametrize("where", ["a global", "a module", "an object"])
@pytest.mark.parametrize("ask", ASKED)
def test_so_is_one_in_a_dictionary_or_a_list(ask, where):
    make = functools.partial(in_settings, ASKED[ask], where)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = differences(trail(make, eagerly=True), trail(make, eagerly=False))
    assert not found, "\n".join(found)


def replaced(settings: Any, at: int) -> None:
    settings["rate"] = [1.0, 2.0][at % 2 if at > 3 else 0]  # another entry, which was the same one until then


def taken_away(settings: Any, at: int) -> None:
    if at == 4:
        del settings["weight"]


def another_kind(settings: Any, at: int) -> None:
    settings["weight"] = [0.1, 0.2, 0.3, 1, True, 2, 0.5][at]


def grown(settings: Any, at: int) -> None:
    if at > 3:
        settings["list"].append(float(at))


def another_list(settings: Any, at: int) -> None:
    if at > 3:
        settings["list"] = [float(at), 3.0]


def one_in_two_places(settings: Any, at: int) -> None:
    settings["list"] = settings["other"] = [float(at), 3.0]


@pytest.mark.filterwarnings("ignore:lowtide has captured the step anew", "ignore:this call runs as")
@pytest.mark.parametrize("change", [replaced, taken_away, another_kind, grown, another_list, one_in_two_places])
@pytest.mark.parametrize("where", ["a global", "a module", "an object"])
def test_what_else_changes_there_is_noticed(change, where):
    def ask(settings: Any) -> float:
        rate, other = settings.get("rate", 1.0), settings.get("other", [1.0])[0]
        return settings.get("weight", 7.0) * rate * other * sum(settings["list"]) * settings["list"][-1]

    def make() -> Case:
        model, loss, between, settings = in_settings(ask, where)

        def both(at: int) -> None:
            between(at)
            change(settings, at)

        return model, loss, both, settings

    found = differences(trail(make, eagerly=True), trail(make, eagerly=False))
    assert not found, "\n".join(found)


@pytest.mark.filterwarnings("ignore:lowtide has captured the step anew")
@pytest.mark.parametrize("make", [decided, of_another_kind, in_another_thread])
def test_what_is_decided_by_a_number_is_as_in_eager(make):
    found = differences(trail(make, eagerly=True), trail(make, eagerly=False))
    assert not found, "\n".join(found)
