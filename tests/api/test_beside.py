"""What a loss reads of anything but the model: noticed in the next call, or told, whatever it is."""

import collections
import copy
import functools
import random
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide

SETTINGS = types.SimpleNamespace(rate=1.0)
TABLE: dict[str, Any] = {"rate": 1.0, "weight": torch.ones(4)}
RATE = 1.0
Change = Callable[[float], None]
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate, self.inner = 1.0, nn.Dropout(0.5)
        self.register_buffer("weight", torch.ones(4))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return (y * self.rate * self.weight).square().mean()


class State:
    rate = 1.0


class Slotted:
    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = 1.0


class Owner:
    def __init__(self, kept: Any = None) -> None:
        self.rate, self.state, self.kept, self._told = 1.0, State(), kept, 1.0

    @property
    def told(self) -> float:
        return self._told

    def method(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) * self.rate * self.state.rate).square().mean()

    def by_property(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) * self.told * getattr(self, "extra", 1.0)).square().mean()

    def __call__(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.helper(model(x))

    def helper(self, y: torch.Tensor) -> torch.Tensor:
        return (y * RATE * self.rate).square().mean()


def scaled(model: nn.Module, x: torch.Tensor, rate: float = 1.0) -> torch.Tensor:
    return (model(x) * rate).square().mean()


def with_table(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) * TABLE["rate"] * TABLE["weight"]).square().mean()


def with_global(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return sum((y * RATE).square().mean() for y in model(x).chunk(2))


def with_class_and_settings(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) * SETTINGS.rate * Steps.rate).square().mean()


class Steps:
    rate = 1.0


def _attribute(item: Any, name: str = "rate") -> Change:
    return lambda number: setattr(item, name, number)


def _in_globals(number: float) -> None:
    global RATE
    RATE = number


def _kinds() -> Iterator[tuple[str, Callable[[], tuple[Loss, Change]]]]:
    def criterion(change: Callable[[Criterion], Change], training: bool = False) -> Callable[[], tuple[Loss, Change]]:
        def make() -> tuple[Loss, Change]:
            own = Criterion().train(training)
            return lambda model, x: own(own.inner(model(x))), change(own)

        return make

    yield "an attribute of a criterion", criterion(_attribute)
    yield "a buffer of a criterion", criterion(lambda own: lambda number: setattr(own, "weight", torch.full((4,), number)))
    yield "the mode of a criterion", criterion(lambda own: lambda number: own.train(number > 1) and None)

    def method() -> tuple[Loss, Change]:
        owner = Owner()
        return owner.method, _attribute(owner)

    def further() -> tuple[Loss, Change]:
        owner = Owner()
        return owner.method, _attribute(owner.state)  # where the class had it

    def replaced() -> tuple[Loss, Change]:
        owner = Owner()

        def change(number: float) -> None:
            owner.state = State()
            owner.state.rate = number

        return owner.method, change

    def by_property() -> tuple[Loss, Change]:
        owner = Owner()
        return owner.by_property, _attribute(owner, "_told")

    def added() -> tuple[Loss, Change]:
        owner = Owner()
        return owner.by_property, _attribute(owner, "extra")

    def called() -> tuple[Loss, Change]:
        owner = Owner()
        return owner, _attribute(owner)

    def called_global() -> tuple[Loss, Change]:
        return Owner(), _in_globals

    def partial() -> tuple[Loss, Change]:
        loss = functools.partial(scaled, rate=1.0)
        return loss, lambda number: loss.keywords.update(rate=number)

    def defaults() -> tuple[Loss, Change]:
        rates = [1.0]

        def loss(model: nn.Module, x: torch.Tensor, rates: list[float] = rates) -> torch.Tensor:
            return (model(x) * rates[0]).square().mean()

        return loss, lambda number: rates.__setitem__(0, number)

    def cell() -> tuple[Loss, Change]:
        rate = 1.0

        def change(number: float) -> None:
            nonlocal rate
            rate = number

        return lambda model, x: (model(x) * rate).square().mean(), change

    def deque() -> tuple[Loss, Change]:
        kept = collections.deque([1.0, 1.0], maxlen=2)
        return lambda model, x: (model(x) * sum(kept)).square().mean(), kept.append

    def array() -> tuple[Loss, Change]:
        kept = np.ones(2)
        return lambda model, x: (model(x) * float(kept.sum())).square().mean(), lambda number: kept.__setitem__(0, number)

    def slotted() -> tuple[Loss, Change]:
        own = Slotted()
        return lambda model, x: (model(x) * own.rate).square().mean(), _attribute(own)

    for make in (method, further, replaced, by_property, added, called, called_global, partial, defaults, cell, deque, array, slotted):
        yield make.__name__, make
    yield "global", lambda: (with_global, _in_globals)
    yield "entry of a table", lambda: (with_table, lambda number: TABLE.update(rate=number))
    yield "tensor bound anew", lambda: (with_table, lambda number: TABLE.update(weight=torch.full((4,), number)))
    yield "attribute of settings", lambda: (with_class_and_settings, _attribute(SETTINGS))
    yield "attribute of a class", lambda: (with_class_and_settings, _attribute(Steps))


KINDS = dict(_kinds())


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    _in_globals(1.0)
    SETTINGS.rate = Steps.rate = 1.0
    TABLE.update(rate=1.0, weight=torch.ones(4))


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def eager_step(model: nn.Module, optimizer: Any, loss: Loss, x: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    value = loss(model, x)
    value.backward()
    for each in optimizer if isinstance(optimizer, list) else [optimizer]:
        each.step()
    return value.detach()


def side_by_side(make: Callable[[], tuple[Loss, Change]], changes: dict[int, float], steps: int = 20) -> None:
    """Twenty steps of eager and of lowtide, with a number changed before some: no difference, and no warning."""
    batches = torch.randn(steps, 6, 3, generator=torch.Generator().manual_seed(1))
    runs = []
    for captured in (False, True):
        (model, optimizer), (loss, change) = model_and_optimizer(), make()
        step = functools.partial(eager_step, model, optimizer, loss)
        if captured:
            step = lowtide.optimize(
                model,
                (batches[0],),
                loss=loss,
                optimizer=optimizer,
                planning=lowtide.Planning(workspaces=False),
                run=lowtide.Run(check="never"),
            )
        torch.manual_seed(2)
        values = []
        for at in range(steps):
            if at in changes:
                change(changes[at])
            values.append(step(batches[at]))
        change(1.0)
        runs.append((values, [*model.parameters()]))
    for eager, ours in zip(*(values for values, _ in runs), strict=True):
        assert torch.equal(eager, ours)
    assert all(map(torch.equal, *(parameters for _, parameters in runs)))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_loss_reads_beside_the_model_is_noticed(kind: str):
    drawn = random.Random(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        side_by_side(KINDS[kind], {drawn.randrange(1, 20): drawn.uniform(1.5, 3.0)})


def test_what_the_loss_does_not_read_changes_as_it_likes():
    owner = Owner()
    owner.history = []
    model, optimizer = model_and_optimizer()
    step = lowtide.optimize(model, (torch.ones(6, 3),), loss=owner.method, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
    before = step._lookup.families
    for at in range(3):
        owner.history.append(step(torch.ones(6, 3)))
        owner.number = at
    assert step._lookup.families is before


def test_classes_are_as_they_were_after_a_capture():
    before = [dict(vars(cls)) for cls in (Owner, State, Slotted, types.SimpleNamespace)]
    owner = Owner()
    model, optimizer = model_and_optimizer()
    lowtide.optimize(model, (torch.ones(6, 3),), loss=owner.method, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
    with pytest.raises(lowtide.CaptureError):
        lowtide.optimize(model, (torch.ones(6, 3),), loss=lambda model, x: owner.method(model, x) + None, optimizer=optimizer)
    assert [dict(vars(cls)) for cls in (Owner, State, Slotted, types.SimpleNamespace)] == before
    assert copy.copy(owner).rate == 1.0


class Counts:
    def __init__(self) -> None:
        self.runs, self.table = 0, {"runs": 0}

    def attribute(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return model(x).square().mean()

    def entry(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.table["runs"] += 1
        return model(x).square().mean()


def _counts_nonlocal() -> tuple[Loss, Callable[[], int]]:
    runs = 0

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        return model(x).square().mean()

    return loss, lambda: runs


def _counts_attribute() -> tuple[Loss, Callable[[], int]]:
    counts = Counts()
    return counts.attribute, lambda: counts.runs


def _counts_entry() -> tuple[Loss, Callable[[], int]]:
    counts = Counts()
    return counts.entry, lambda: counts.table["runs"]


@pytest.mark.parametrize("make", [_counts_attribute, _counts_entry, _counts_nonlocal])
def test_a_count_in_python_goes_on(make: Callable[[], tuple[Loss, Callable[[], int]]]):
    model, optimizer = model_and_optimizer()
    loss, runs = make()
    before = runs()
    step = lowtide.optimize(model, (torch.ones(6, 3),), loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
    assert runs() == before
    for calls in (1, 2, 3):
        step(torch.ones(6, 3))
        assert runs() == before + calls


class Scheduled(torch.optim.SGD):
    gain = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.1 * self.gain)


@pytest.mark.parametrize("several", [False, True])
def test_an_attribute_of_an_optimizer_is_noticed(several: bool):
    x, models = torch.ones(6, 3), []
    for captured in (False, True):
        model, _ = model_and_optimizer()
        optimizer = Scheduled([model.weight] if several else model.parameters(), lr=0.1)
        both = [optimizer, Scheduled([model.bias], lr=0.1)] if several else optimizer
        step = functools.partial(eager_step, model, both, scaled)
        if captured:
            step = lowtide.optimize(
                model, (x,), loss=scaled, optimizer=both, planning=lowtide.Planning(workspaces=False), run=lowtide.Run(check="never")
            )
        for at in range(4):
            optimizer.gain = 1.0 if at < 2 else 2.0
            step(x)
        models.append(model)
    assert all(map(torch.equal, *(model.parameters() for model in models)))


def test_a_function_that_forward_calls_reads_globals():
    model = Calls()
    x = torch.ones(2, 3)
    fn = lowtide.optimize(model, (x,), planning=lowtide.Planning(workspaces=False))
    for number in (1.0, 2.0, 2.0, 1.0):
        _in_globals(number)
        with torch.no_grad():
            assert torch.equal(fn(x), model(x))


def helped(y: torch.Tensor) -> torch.Tensor:
    return y * RATE


class Calls(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helped(super().forward(x))
