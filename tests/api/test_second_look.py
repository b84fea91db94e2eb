"""A step is captured once more at some of its calls: what nobody watches is found, and nothing that is the same is taken for another."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.api.lookup import SecondLook

X = torch.linspace(-1, 1, 24).reshape(6, 4)
_NAME = "LOWTIDE_TEST_RATE"


def by_environment(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) * float(os.getenv(_NAME, "1"))).square().mean()


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_NAME, "1")


def trained(loss: Callable[..., Any], steps: int, between: Callable[[int], None], check: str | None) -> tuple[list[Any], nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step = (
        None
        if check is None
        else lowtide.optimize(
            model, (X,), loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False), run=lowtide.Run(check=check)
        )
    )
    values = []
    for at in range(steps):
        between(at)
        if step is None:
            optimizer.zero_grad()
            value = loss(model, X)
            value.backward()
            optimizer.step()
        values.append(value.detach() if step is None else step(X))
    return values, model


def in_environment(changes: dict[int, str]) -> Callable[[int], None]:
    return lambda at: os.environ.__setitem__(_NAME, changes.get(at, os.environ[_NAME]))


def same(one: tuple[list[Any], nn.Module], two: tuple[list[Any], nn.Module]) -> bool:
    return all(map(torch.equal, one[0], two[0])) and all(map(torch.equal, one[1].parameters(), two[1].parameters()))


def test_what_changes_before_the_second_call_is_found_and_named(environment: None):
    changes = {1: "2"}
    eager = trained(by_environment, 3, in_environment(changes), None)
    os.environ[_NAME] = "1"
    with pytest.warns(UserWarning, match=r"an argument of aten.mul.Tensor at .*test_second_look.py:\d+ was 1.0 and is 2.0.*not seen"):
        ours = trained(by_environment, 3, in_environment(changes), "auto")
    assert same(eager, ours)


class Sgd(torch.optim.Optimizer):
    """Where the environment says so its rate is a plain number, which no step would see change."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            rate = group["lr"] if os.getenv(_NAME) == "1" else float.__add__(group["lr"], 1.0)
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * rate)


def test_a_setting_that_escapes_from_some_call_on_is_a_difference():
    model = nn.Linear(4, 3)
    step = lowtide.optimize(model, (X,), loss=plain, optimizer=Sgd(model.parameters(), {"lr": 0.1}), run=lowtide.Run(check="always"))
    step(X), step(X)
    before = [each.clone() for each in model.parameters()]
    os.environ[_NAME] = "2"
    with (
        pytest.warns(UserWarning, match=r"an argument of aten.mul.Tensor .* and is \S+; lowtide has not seen"),
        pytest.raises(lowtide.CaptureError, match="Sgd turns a hyper-parameter into a constant"),
    ):
        step(X)
    assert all(map(torch.equal, before, model.parameters()))


def test_what_changes_in_each_call_is_left_to_the_loop():
    changes = {at: str(at + 1) for at in range(8)}
    eager = trained(by_environment, 8, in_environment(changes), None)
    os.environ[_NAME] = "1"
    with pytest.warns(UserWarning, match="lowtide") as told:
        ours = trained(by_environment, 8, in_environment(changes), "auto")
    assert same(eager, ours)
    assert [str(each.message).split(":")[0] for each in told][-1].startswith("lowtide has captured the step anew in 3 calls in a row")
    assert len(told) == 2


def test_always_looks_at_each_call_and_never_at_none():
    changes = {3: "2", 6: "3"}
    eager = trained(by_environment, 8, in_environment(changes), None)
    os.environ[_NAME] = "1"
    with pytest.warns(UserWarning, match="was 1.0 and is 2.0"):
        assert same(eager, trained(by_environment, 8, in_environment(changes), "always"))
    os.environ[_NAME] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not same(eager, trained(by_environment, 8, in_environment(changes), "never"))


def test_what_a_look_finds_is_what_eager_returns_beside_tensors():
    def loss(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        return model(x).square().mean(), float(os.getenv(_NAME, ""))

    model = nn.Linear(4, 3)
    os.environ[_NAME] = "1"
    step = lowtide.optimize(
        model, (X,), loss=loss, optimizer=torch.optim.SGD(model.parameters(), 0.1), planning=lowtide.Planning(workspaces=False)
    )
    step(X)
    os.environ[_NAME] = "2"
    with pytest.warns(UserWarning, match="what the program returns beside tensors was"):
        assert step(X)[1] == 2.0


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adagrad,
]  # fmt: skip


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_program_that_stays_as_it_is_is_never_another(make: Callable[[Any], torch.optim.Optimizer]):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.2))
    scheduled = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(scheduled, 0.9)
    clip = lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: E731
    step = lowtide.optimize(
        model,
        (X,),
        loss=plain,
        optimizer=scheduled,
        training=lowtide.Training(after_backward=clip),
        planning=lowtide.Planning(workspaces=False),
        run=lowtide.Run(check="always"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for at in range(4):
            before = torch.get_rng_state()
            variants = step._lookup.families[0].variants
            difference = step._maker.difference(variants[min(at, len(variants) - 1)].captured, (X,), {})
            assert torch.equal(before, torch.get_rng_state())
            assert difference == ("", False)
            step(X)
            scheduler.step()


def test_looks_come_ever_more_seldom_and_keep_to_their_share():
    def looks(check: SecondLook, calls: int, step_s: float, look_s: float) -> list[int]:
        found = []
        for call in range(1, calls + 1):
            if check.due():
                found.append(call)
                check.took(look_s)
            check.ran(step_s)
        return found

    assert looks(SecondLook("auto", timed=True), 40, 1.0, 0.0) == [2, 3, 5, 9, 17, 33]
    assert looks(SecondLook("auto", timed=False), 10, 1.0, 9.0) == [2, 3, 5, 9]
    assert looks(SecondLook("auto", timed=True), 700, 1.0, 2.0) == [2, 201, 401]
    assert looks(SecondLook("always", timed=True), 4, 1.0, 9.0) == [2, 3, 4]
    assert looks(SecondLook("never", timed=True), 4, 1.0, 0.0) == []


def test_what_begins_to_count_counts_on():
    class Starts:
        def __init__(self) -> None:
            self.on, self.count, self.table = False, 0, {"count": 0}

        def loss(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            if os.getenv(_NAME) == "2":
                self.count += 1
                self.table["count"] += 1
            return model(x).square().mean()

    model, owner = nn.Linear(4, 3), Starts()
    step = lowtide.optimize(
        model, (X,), loss=owner.loss, optimizer=torch.optim.SGD(model.parameters(), 0.1), planning=lowtide.Planning(workspaces=False)
    )
    step(X)
    os.environ[_NAME] = "2"
    with pytest.warns(UserWarning, match="not what it was 1 calls ago: what the program puts into .* has changed"):
        step(X)
    step(X)
    assert (owner.count, owner.table) == (2, {"count": 2})  # as eager counts


def test_another_policy_is_refused():
    model = nn.Linear(4, 3)
    with pytest.raises(ValueError, match="check: expected one of 'auto', 'always', 'never', got 'often'"):
        lowtide.optimize(model, (X,), run=lowtide.Run(check="often"))
