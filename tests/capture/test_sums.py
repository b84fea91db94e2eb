"""Numbers that a program sums up in places of the caller's go on by each step, as eager's do: attributes, dictionaries, variables."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import lowtide
from bench.in_values import in_values
from tests.leaving import STEPS, Attributes, Meter, Net, check, square, trained
from tests.training import check as trains_alike
from tests.training import differences

count, newest = 0, None  # as a script's own


class Totals:
    """As trainers and meters sum up."""

    def __init__(self) -> None:
        self.total: float = 0
        self.calls = self.tokens = 0
        self.shown: dict[str, Any] = {}
        self.means: list[float] = []

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        mask = (x[:, 0] > 0.5).long()
        loss = ((model(x).sum(1) - 1).square() * mask).mean()
        count = mask.sum().item()
        self.total += loss.item() * count
        self.tokens += count // 1
        self.calls += 1
        self.shown["tokens"] = [self.tokens]
        self.means.append(-self.total / count if count > 0 else 0.0)
        self.means.append(round(loss.item(), 4))
        return loss


def summing() -> tuple[Net, Callable[..., Any], Any]:
    totals = Totals()
    return Net(), totals.loss, Attributes(totals, "total", "calls", "tokens", "shown", "means")


def test_what_is_summed_up_goes_on_by_one_program(recwarn):
    """Counts of each batch, too, which are another number each time: nothing depends on them but what is put there."""
    by_adam = {"optimizer_class": optim.Adam}  # the first step and those after it sum up in one place
    assert not differences(trained(summing, eagerly=True, **by_adam), trained(summing, eagerly=False, **by_adam))
    totals, model, batches = Totals(), Net(), [torch.rand(5, 3) for _ in range(3)]
    optimizer = optim.SGD(model.parameters())
    step = lowtide.optimize(
        model,
        batches[0],
        loss=totals.loss,
        optimizer=optimizer,
        planning=lowtide.Planning(workspaces=False),
        run=lowtide.Run(check="always"),
    )
    assert (totals.total, totals.calls, totals.tokens) == (0, 0, 0)
    for x in batches:
        step(x)
    assert totals.calls == 3
    assert totals.tokens == sum((x[:, 0] > 0.5).sum().item() for x in batches)
    assert not [each for each in recwarn if "captured" in str(each.message)]


def test_a_total_that_is_set_anew_between_steps_goes_on_from_there():
    totals, model, x = Totals(), Net(), torch.rand(5, 3)
    step = lowtide.optimize(
        model, x, loss=totals.loss, optimizer=optim.SGD(model.parameters()), planning=lowtide.Planning(workspaces=False)
    )
    step(x)
    totals.tokens = 100
    step(x)
    assert totals.tokens == 100 + (x[:, 0] > 0.5).sum().item()


def decides(total: float, loss: Tensor) -> object:
    return loss * 2 if total > 1 else loss


def kept_in_a_set(total: float, loss: Tensor) -> object:
    seen.append(frozenset([(total,)]))
    return loss


def printed(total: float, loss: Tensor) -> object:
    return loss * len(f"{total}")


seen: collections.UserList[Any] = collections.UserList()


@pytest.mark.parametrize("use", [decides, kept_in_a_set, printed])
def test_a_total_that_is_used_otherwise_is_refused_and_is_as_before(use):
    totals = Totals()

    def loss(model: nn.Module, x: Tensor) -> Any:
        result = model(x).square().mean()
        totals.total += result.item()
        return use(totals.total, result)

    model = Net()
    with pytest.raises(lowtide.CaptureError, match=r"control flow depends on data"):
        lowtide.optimize(
            model, torch.rand(5, 3), loss=loss, optimizer=optim.SGD(model.parameters()), planning=lowtide.Planning(workspaces=False)
        )
    assert totals.total == 0


def summed(loss: Callable[[nn.Module, Tensor], Tensor], place: Any) -> tuple[Net, Callable[..., Any], Any]:
    return Net(), loss, place


def floats_and_whole_numbers() -> Any:
    kept, meter = list[Any](), Meter()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        value = out.square().mean()
        kept.append(float(value.detach()))
        kept.append((int((out > 0).sum()), float((out > 0).sum()), isinstance(float(value.detach()), float)))
        meter.last = float(value.item())
        return value * float(2)

    return summed(loss, [kept, meter])


def in_dictionaries() -> Any:
    totals, counts, rows = {"loss": 0.0}, collections.Counter[str](), collections.defaultdict[str, float](float)
    nested = {"train": {"norm": 1}, "eval": {"norm": 2}}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        totals["loss"] += value.item() * len(x)
        totals["last"] = totals.get("last", 0.0) - value.item()
        counts["steps"] += 1
        counts.update(["a", "b", "a"])
        rows["first"] += (x > 0.5).sum().item()
        rows.setdefault("second", 1)
        rows["second"] *= 2
        rows["mean"] = rows["first"] / rows["second"]
        nested["train"]["norm"] += value.item()
        return value

    return summed(loss, [totals, counts, rows, nested])


def meters_in_a_dictionary() -> Any:
    class Average:
        def __init__(self) -> None:
            self.sum = self.count = self.mean = 0.0

        def update(self, value: float, rows: int) -> None:
            self.sum += value * rows
            self.count += rows
            self.mean = self.sum / self.count

    meters = {"loss": Average()}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        meters["loss"].update(value.item(), len(x))
        return value

    return summed(loss, Attributes(meters["loss"], "sum", "count", "mean"))


def in_forward() -> Any:
    seen = collections.Counter[str]()

    class Counting(Net):
        outs: list[Any] = []  # noqa: RUF012

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            seen["rows"] += len(x)
            self.outs.append(out.detach())
            return out

    Counting.outs.clear()
    return Counting(), square, [seen, Counting.outs]


def beside_numbers_of_constants() -> Any:
    """As solvers of differential equations count calls of a field, and lay their grid by `.item()` of the ends that they are given."""
    counts, ends = {"calls": 0}, torch.tensor([0.0, 1.0])

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value, points = square(model, x), torch.ceil((ends[1] - ends[0]) / torch.tensor(0.4)).item()
        for at in torch.arange(0, points) * 0.4:
            counts["calls"] += 1
            value = value + at * model(x).mean()
        return value

    return summed(loss, [counts])


@pytest.mark.parametrize(
    "make", [floats_and_whole_numbers, in_dictionaries, meters_in_a_dictionary, in_forward, beside_numbers_of_constants]
)
def test_what_is_summed_up_is_what_eager_sums_up(make):
    check(make)


def stepped(loss: Callable[..., Any], between: Callable[[int], object], *, eagerly: bool, model: Net | None = None, **options: Any) -> Any:
    """The losses of five steps. `between` is called before each."""
    torch.manual_seed(0)
    model = model or Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.rand(4, 3) for _ in range(5)]
    step = (
        None if eagerly else lowtide.optimize(model, batches[0], loss=loss, optimizer=optimizer, **in_values(workspaces=False, **options))
    )
    results = []
    for at, x in enumerate(batches):
        between(at)
        if step is not None:
            results.append(step(x).detach())
            continue
        optimizer.zero_grad()
        parts = [loss(model, part) / options.get("accumulate", 1) for part in x.chunk(options.get("accumulate", 1))]
        for part in parts:
            part.backward()
        optimizer.step()
        results.append(sum(parts).detach())
    return results


def variables(*, eagerly: bool) -> Any:
    global count, newest
    count, newest = 0, None
    total, last, words = 0.0, None, ""
    trail = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        global count, newest
        nonlocal total, last, words
        value = square(model, x)
        total += value.item()
        last, words = {"loss": value.detach(), "rows": len(x)}, "seen"
        count += 1
        newest = value.detach()
        return value

    def between(at: int) -> None:
        nonlocal total, last
        trail.append((total, last and last["loss"], words, count, newest))
        total, last = (0, None) if at == 2 else (total, last)

    results = stepped(loss, between, eagerly=eagerly, accumulate=2)
    return [results, trail, total, count]


def test_variables_and_globals_are_as_eager_leaves_them(recwarn):
    expected = variables(eagerly=True)
    assert not differences([*map(list, expected[1])], [*map(list, variables(eagerly=False)[1])])
    assert not [str(each.message) for each in recwarn if "captured" in str(each.message)]


def test_a_variable_of_a_module_made_in_a_function_and_of_a_hook():
    found = []
    for eagerly in (True, False):
        seen = norm = 0

        class Counting(Net):
            def forward(self, x: Tensor) -> Tensor:
                nonlocal seen
                seen += len(x)
                return super().forward(x)

        def hook(module: nn.Module, given: Any, out: Tensor) -> None:
            nonlocal norm
            norm += out.norm().item()

        model = Counting()
        model.first.register_forward_hook(hook)
        results = stepped(square, lambda at: None, eagerly=eagerly, model=model)
        found.append([len(results), seen])
        assert norm > 0
    assert found[0] == found[1]


def test_two_steps_of_one_function_sum_up_in_one_place():
    total = 0

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal total
        total += len(x)
        return square(model, x)

    models = Net(), Net()
    steps = [
        lowtide.optimize(m, torch.rand(4, 3), loss=loss, optimizer=optim.SGD(m.parameters()), planning=lowtide.Planning(workspaces=False))
        for m in models
    ]
    assert total == 0
    for step in (*steps, *steps):
        step(torch.rand(4, 3))
    assert total == 16


def test_an_interrupt_leaves_all_as_it_was():
    total, last, counts, runs = 0.0, "before", collections.Counter(steps=3), itertools.count()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal total, last
        value = square(model, x)
        total += value.item()
        last, counts["steps"] = value.detach(), counts["steps"] + 1
        if next(runs) == 2:
            raise KeyboardInterrupt
        return value

    model = Net()
    with pytest.raises(KeyboardInterrupt):
        lowtide.optimize(
            model, torch.rand(4, 3), loss=loss, optimizer=optim.SGD(model.parameters()), planning=lowtide.Planning(workspaces=False)
        )
    assert (total, last, counts) == (0.0, "before", {"steps": 3})


def refused(loss: Callable[..., Any], why: str) -> None:
    model = Net()
    with pytest.raises(lowtide.CaptureError, match=why):
        lowtide.optimize(
            model, torch.rand(4, 3), loss=loss, optimizer=optim.SGD(model.parameters()), planning=lowtide.Planning(workspaces=False)
        )


def test_a_variable_that_is_read_first_and_may_be_another_tensor_is_refused():
    last = torch.zeros(())
    known = [last]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal last
        last = 0.9 * last + square(model, x).detach() + known[0]
        return square(model, x)

    before = last
    refused(loss, "reads variable 'last', which an earlier step has put there")
    assert last is before


def told(model: nn.Module, x: Tensor) -> Any:
    """As losses return what is logged, with draws before it."""
    value = nn.functional.dropout(model(x), 0.3).square().mean()
    return value, {"loss": -value.item(), "both": [round(value.item(), 3), 2 * value.sqrt().item() + 1, (x > 0.5).sum().item() * 2]}


def test_arithmetic_on_numbers_that_are_returned():
    def make():
        model = Net()
        return model, torch.rand(4, 3), told, optim.SGD(model.parameters(), 0.1)

    trains_alike(make, options={"planning": lowtide.Planning(workspaces=False), "run": lowtide.Run(check="always")})


def test_an_inference_function_that_returns_a_computed_number():
    class Norm(nn.Module):
        def forward(self, x):
            return -2 * x.square().sum().item()

    x = torch.rand(5)
    assert lowtide.optimize(Norm(), (x,), planning=lowtide.Planning(workspaces=False))(x) == Norm()(x)


def test_what_is_returned_of_earlier_steps_goes_on():
    def made(totals):
        def loss(model: nn.Module, x: Tensor) -> Any:
            value = square(model, x)
            totals.total += value.item()
            totals.calls += 1
            return value, {"mean": totals.total / totals.calls, "calls": totals.calls}

        model = Net()
        return model, torch.rand(4, 3), loss, optim.SGD(model.parameters(), 0.1)

    ours, eagers = Totals(), Totals()
    turns = itertools.cycle([eagers, ours])
    trains_alike(lambda: made(next(turns)), steps=4, options={"planning": lowtide.Planning(workspaces=False)})
    assert vars(ours) == vars(eagers)


class Counting:
    calls, total = 0, 0.0

    def __init__(self) -> None:
        type(self).calls, type(self).total = 0, 0.0

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        loss = square(model, x)
        Counting.calls += 1
        type(self).total += loss.item()
        return loss


class Beginning:
    """Its instance begins with numbers of the class."""

    steps, total = 0, 0.5

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        loss = square(model, x)
        self.steps += 1
        self.total += loss.item() * self.steps
        return loss


def test_sums_in_attributes_of_a_class_go_on():
    def make() -> Any:
        loss = Counting()
        return Net(), loss, [Attributes(Counting, "calls", "total")]

    check(make)
    assert Counting.calls == STEPS


def test_sums_of_an_object_begin_with_numbers_of_its_class():
    def make() -> Any:
        loss = Beginning()
        return Net(), loss, Attributes(loss, "steps", "total")

    check(make)
    assert (Beginning.steps, Beginning.total) == (0, 0.5)


class Derived(Counting):
    def __init__(self) -> None: ...


def test_a_class_is_as_before_where_a_count_in_it_is_refused():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        Derived.calls += 1  # found in the class above
        return square(model, x)

    model = Net()
    with pytest.raises(lowtide.CaptureError, match="'calls' of the class Derived"):
        lowtide.optimize(model, torch.rand(5, 3), loss=loss, optimizer=optim.SGD(model.parameters()))
    assert "calls" not in vars(Derived)
