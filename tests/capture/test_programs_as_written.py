"""Programs as people write them, by the kind of what they do beside computing: six steps leave what six of the plain loop leave."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.leaving import Net, square, stepping
from tests.training import differences

STEPS = 6
KNOWN = SimpleNamespace(name="known")
NOTHING = object()


class Place:
    """Where a program puts something."""


class Record:
    def __init__(self, number: Any, shared: Any = None) -> None:
        self.number, self.shared, self.list = number, shared, [1, number]


newest: Any = None


def same_object(place: Any, model: Net, x: Tensor) -> Tensor:
    place.seen = KNOWN
    return x


def in_a_class(place: Any, model: Net, x: Tensor) -> Tensor:
    Record.current = KNOWN  # type: ignore[attr-defined]
    place.seen = Record.current is KNOWN  # type: ignore[attr-defined]
    return x


def same_list(place: Any, model: Net, x: Tensor) -> Tensor:
    place.seen = model.outs
    return x


def same_array(place: Any, model: Net, x: Tensor) -> Tensor:
    place.seen = ARRAY
    return x


ARRAY = np.arange(3.0)


def in_a_global(place: Any, model: Net, x: Tensor) -> Tensor:
    global newest
    newest = KNOWN
    return x


def made_anew(place: Any, model: Net, x: Tensor) -> Tensor:
    place.seen = place.again = Record(3, KNOWN)
    return x


def in_a_module(place: Any, model: Net, x: Tensor) -> Tensor:
    model.seen = Record(x.shape[0], KNOWN)  # type: ignore[assignment]
    return x


def function_made_anew(place: Any, model: Net, x: Tensor) -> Tensor:
    count = x.shape[0]
    place.seen = lambda number: number + count
    place.again = functools.partial(max, 3)
    return x


def iterator(place: Any, model: Net, x: Tensor) -> Tensor:
    place.seen = iter([1, 2, 3])
    next(place.seen)
    return x


def under_a_key(place: Any, model: Net, x: Tensor) -> Tensor:
    TABLE["known"] = KNOWN
    return x


TABLE: dict[str, Any] = {"known": None}


def looked_at(place: Any) -> Any:
    """What a program has put there: objects by what tells them apart."""
    found = []
    for item in (*vars(place).values(), newest, TABLE["known"], getattr(Record, "current", None)):
        if isinstance(item, Record):
            found.append([item.number, item.shared is KNOWN, item.list, item is vars(place).get("again")])
        elif callable(item):
            found.append(item(1))
        else:
            found.append([item is KNOWN, item is ARRAY, list(item) if hasattr(item, "__next__") else None])
    return found


def emptied(place: Any) -> None:
    global newest
    newest = TABLE["known"] = None
    vars(place).clear()
    Record.current = None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "puts",
    [
        same_object, in_a_class, same_list, same_array, in_a_global, made_anew, in_a_module, function_made_anew, iterator, under_a_key,
    ],
)  # fmt: skip
def test_each_step_puts_an_object_there(puts: Callable[..., Tensor]) -> None:
    """Between steps somebody else takes it away."""
    left = []
    for eagerly in (True, False):
        torch.manual_seed(0)
        model, place, found = Net(), Place(), []
        emptied(place)

        def loss(model: Net, x: Tensor, place: Any = place) -> Tensor:
            return square(model, puts(place, model, x))

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.rand(5, 3)
        step = (lambda: loss(model, x)) if eagerly else stepping(model, loss, optimizer, x)  # noqa: B023
        emptied(place)
        for _ in range(3):
            step()
            found.append([looked_at(place), type(getattr(model, "seen", None)).__name__, vars(place).get("seen") is model.outs])
            emptied(place)
            vars(model).pop("seen", None)
        left.append(found)
    assert left[0] == left[1]


@pytest.mark.parametrize("item", [lambda: (each for each in "ab"), lambda: Record(random.SystemRandom().random())])
def test_what_no_step_makes_again_is_refused(item: Callable[[], Any]) -> None:
    place, model = Place(), Net()

    def loss(model: Net, x: Tensor) -> Tensor:
        place.seen = item()  # type: ignore[attr-defined]
        return square(model, x)

    with pytest.raises(lowtide.CaptureError, match="something else into attribute 'seen' of a Place each time"):
        stepping(model, loss, torch.optim.SGD(model.parameters(), 0.1), torch.rand(5, 3))
    assert not vars(place)


def test_objects_that_change_places_are_refused() -> None:
    place, model = Place(), Net()
    place.one, place.two = Record(1), Record(2)  # type: ignore[attr-defined]

    def loss(model: Net, x: Tensor) -> Tensor:
        place.one, place.two = place.two, place.one  # type: ignore[attr-defined]
        return square(model, x) * place.one.number  # type: ignore[attr-defined]

    with pytest.raises(lowtide.CaptureError, match=r"changes what it rests on each time.*was a Record and is a Record"):
        stepping(model, loss, torch.optim.SGD(model.parameters(), 0.1), torch.rand(5, 3))


# What goes on from step to step: each makes the loss of a model and a batch, and says where it keeps something.


def average_in_a_dictionary(model: Net) -> tuple[Callable[..., Any], Any]:
    kept = {name: each.detach().clone() for name, each in model.named_parameters()}

    def loss(model: Net, x: Tensor) -> Tensor:
        for name, each in model.named_parameters():
            assert name in kept
            kept[name] = 0.9 * kept[name] + 0.1 * each.detach()
        return square(model, x) + 0.1 * torch.func.functional_call(model, kept, (x,)).mean().detach() * square(model, x)

    return loss, kept


def average_over_items(model: Net) -> tuple[Callable[..., Any], Any]:
    kept = {name: each.detach().clone() for name, each in model.named_parameters()}

    def loss(model: Net, x: Tensor) -> Tensor:
        now = dict(model.named_parameters())
        for name, each in kept.items():
            kept[name] = 0.9 * each + 0.1 * now[name].detach()
        return square(model, x)

    return loss, kept


def average_replaced(model: Net) -> tuple[Callable[..., Any], Any]:
    place = Place()
    place.kept = [each.detach().clone() for each in model.parameters()]  # type: ignore[attr-defined]

    def loss(model: Net, x: Tensor) -> Tensor:
        place.kept = [0.9 * old + 0.1 * new.detach() for old, new in zip(place.kept, model.parameters(), strict=True)]  # type: ignore[attr-defined]
        return square(model, x)

    return loss, place


def summed_from_nothing(model: Net) -> tuple[Callable[..., Any], Any]:
    kept: dict[str, Any] = {}

    def loss(model: Net, x: Tensor) -> Tensor:
        for name, each in model.named_parameters():
            kept[name] = kept.get(name, 0) + each.detach().square()
        return square(model, x)

    return loss, kept


def state_of_a_cell(model: Net) -> tuple[Callable[..., Any], Any]:
    place, cell = Place(), nn.LSTMCell(3, 3).requires_grad_(False)
    place.state = None  # type: ignore[attr-defined]

    def loss(model: Net, x: Tensor) -> Tensor:
        state = (torch.zeros(5, 3), torch.zeros(5, 3)) if place.state is None else place.state  # type: ignore[attr-defined]
        hidden, memory = cell(x, state)
        place.state = hidden.detach(), memory.detach()  # type: ignore[attr-defined]
        return square(model, hidden)

    return loss, place


def newest_alone(model: Net) -> tuple[Callable[..., Any], Any]:
    kept: list[Any] = []

    def loss(model: Net, x: Tensor) -> Tensor:
        value = square(model, x)
        kept.append(value.item())
        if len(kept) > 2:
            kept.pop(0)
        return value

    return loss, kept


def shown_at_times(model: Net) -> tuple[Callable[..., Any], Any]:
    counts = {"steps": 0}

    def loss(model: Net, x: Tensor) -> Tensor:
        value = square(model, x)
        counts["steps"] += 1
        if counts["steps"] % 2 == 0:
            print("step", counts["steps"], value.item())
        print("shape", x.shape)
        return value if counts["steps"] < 4 else 2 * value

    return loss, counts


def drawn_by_numpy(model: Net) -> tuple[Callable[..., Any], Any]:
    kept: list[Any] = []

    def loss(model: Net, x: Tensor) -> Tensor:
        share = np.random.beta(0.4, 0.4)
        share = max(share, 1 - share)
        kept.append(share)
        order = np.random.permutation(len(x))
        mask = torch.from_numpy(np.random.rand(*x.shape) < 0.3)
        return square(model, (share * x + (1 - share) * x[order]).masked_fill(mask, 0.0))

    return loss, kept


def drawn_by_python(model: Net) -> tuple[Callable[..., Any], Any]:
    def loss(model: Net, x: Tensor) -> Tensor:
        if random.random() < 0.5:
            x = x.flip(0)
        order = list(range(5))
        random.shuffle(order)
        return square(model, random.choice([torch.tanh, torch.relu])(x[order] * random.uniform(0.5, 2.0)))

    return loss, None


def drawn_in_pairs(model: Net) -> tuple[Callable[..., Any], Any]:
    """Every other number of Python's lies ready, and moves no generator."""

    def loss(model: Net, x: Tensor) -> Tensor:
        return square(model, x) * random.gauss(1, 0.1)

    return loss, None


def average_that_begins_in_an_empty_dictionary(model: Net) -> tuple[Callable[..., Any], Any]:
    shadow: dict[str, Tensor] = {}

    def loss(model: Net, x: Tensor) -> Tensor:
        for name, weight in model.named_parameters():
            shadow[name] = 0.9 * shadow.get(name, torch.zeros_like(weight)) + 0.1 * weight.detach()
        return square(model, x)

    return loss, shadow


def positions_drawn(model: Net) -> tuple[Callable[..., Any], Any]:
    def loss(model: Net, x: Tensor) -> Tensor:
        x, at = x.clone(), np.random.randint(2)
        x[:, at] = 0
        x[1, [at, at + 1]] = 2.0
        return square(model, torch.roll(x, at, 1) ** (1 + at) * x.select(1, at).sum())

    return loss, None


def positions_counted(model: Net) -> tuple[Callable[..., Any], Any]:
    place, queue = Place(), torch.zeros(2, 3)
    place.at = 0  # type: ignore[attr-defined]

    def loss(model: Net, x: Tensor) -> Tensor:
        queue[place.at] = x[place.at]  # type: ignore[attr-defined]
        place.at = (place.at + 1) % 2  # type: ignore[attr-defined]
        return square(model, x * queue.sum())

    return loss, place


def arrays_written_in_place(model: Net) -> tuple[Callable[..., Any], Any]:
    kept: list[Any] = []

    def loss(model: Net, x: Tensor) -> Tensor:
        weights = same = np.random.rand(2)
        weights *= 2
        weights[0] = 0.5
        np.random.shuffle(weights)
        model.weights = weights
        kept.append((same, model.weights is weights, weights.astype(np.float32).sum() / 3))
        return square(model, x * torch.from_numpy(same).float().sum())

    return loss, kept


def many_arrays(model: Net) -> tuple[Callable[..., Any], Any]:
    kept: list[Any] = []

    def loss(model: Net, x: Tensor) -> Tensor:
        noise = np.random.rand(3)
        for _ in range(40):
            noise = 0.5 * (noise + noise)
        kept.append(noise)
        return square(model, x + torch.as_tensor(noise, dtype=torch.float32))

    return loss, kept


@pytest.mark.parametrize(
    "make",
    [
        average_that_begins_in_an_empty_dictionary,
        average_in_a_dictionary, average_over_items, average_replaced, summed_from_nothing, state_of_a_cell, newest_alone, shown_at_times,
        drawn_by_numpy, drawn_by_python, drawn_in_pairs, positions_drawn, positions_counted, arrays_written_in_place, many_arrays,
    ],
)  # fmt: skip
def test_what_goes_on_from_step_to_step(make: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    left, shown, captured = [], [], []
    for eagerly in (True, False):
        torch.manual_seed(0)
        model = Net()
        loss, place = make(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batches = [torch.rand(5, 3) for _ in range(STEPS)]
        step = None
        if not eagerly:
            step = lowtide.optimize(model, (batches[0],), loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
        random.seed(1)
        np.random.seed(1)
        capsys.readouterr()
        results = []
        for x in batches:
            if step is None:
                optimizer.zero_grad()
                value = loss(model, x)
                value.backward()
                optimizer.step()
            else:
                value = step(x)
            results.append(value.detach())
        kept = vars(place) if isinstance(place, Place) else place
        left.append([results, model.state_dict(), kept, random.random(), np.random.rand()])
        shown.append(capsys.readouterr().out)
        captured.append(step)
    assert not differences(left[0], left[1])
    assert shown[0] == shown[1]


def test_a_program_that_cannot_be_captured_later_on_runs_as_the_loop(tmp_path: Any) -> None:
    counts, model = {"steps": 0}, Net()

    def loss(model: Net, x: Tensor) -> Tensor:
        counts["steps"] += 1
        if counts["steps"] == 3:
            torch.save(model.state_dict(), tmp_path / "third")
        return square(model, x)

    step = stepping(model, loss, torch.optim.SGD(model.parameters(), 0.1), torch.rand(5, 3))
    for _ in range(2):
        step()
    with pytest.warns(UserWarning, match="this call runs as the loop would run it"):
        step()
    assert (tmp_path / "third").exists()
    step()
    assert counts == {"steps": 4}


def test_a_refusal_of_a_program_that_draws_says_what_cannot_be_followed() -> None:
    model = Net()

    def loss(model: Net, x: Tensor) -> Tensor:
        return square(model, nn.functional.dropout(x, random.random()))

    with pytest.raises(lowtide.CaptureError, match=rf"^a number that is drawn, .* is given to dropout\(\) at {__file__}"):
        stepping(model, loss, torch.optim.SGD(model.parameters(), 0.1), torch.rand(5, 3))


def test_a_tensor_that_goes_on_may_not_decide() -> None:
    kept, model = {"mean": torch.ones(3)}, Net()

    def loss(model: Net, x: Tensor) -> Tensor:
        value = square(model, x) * (2 if kept["mean"].mean() > 0.9 else 1)
        kept["mean"] = 0.9 * kept["mean"] + 0.1 * x.mean(0)
        return value

    with pytest.raises(lowtide.CaptureError, match="it decides on entry 'mean' of a dict, which another step has put there"):
        stepping(model, loss, torch.optim.SGD(model.parameters(), 0.1), torch.rand(5, 3))


def test_what_is_met_twice_in_an_object_is_made_anew_too() -> None:
    kept, model = list[Any](), Net()

    def loss(model: Net, x: Tensor) -> Tensor:
        record, names = Place(), ["x"]
        record.pair, record.own = (names, names), record
        kept.append(record)
        return square(model, x)

    step = stepping(model, loss, torch.optim.SGD(model.parameters(), 0.1), torch.rand(5, 3))
    for _ in range(3):
        step()
    assert len({id(each.own) for each in kept}) == len({id(each.pair[0]) for each in kept}) == 3
    assert all(each.own is each and each.pair[0] is each.pair[1] for each in kept)
