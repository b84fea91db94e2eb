"""Flags and sizes that a first call notes: each step leaves them as eager's does, and what most steps run is the program after that."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import lowtide
from bench.in_values import in_values
from tests.training import Settings, eager_step

noted = False


class Noted:
    done = False


told = Noted()


def shifts(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + 1


def scales(module: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]) -> Any:
    return (args[0] * 2,), kwargs


class Net(nn.Module):
    """Runs `first` where it has not run yet."""

    done = ready = False  # of the class

    def __init__(self, first: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.first = nn.Linear(3, 2), first
        self.size, self.note = None, Noted()
        self.shift = self.linear.register_forward_hook(shifts)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.first(self, x)).square().mean()


def checks(model: Net, x: Tensor) -> Tensor:
    if not model.done:
        model.done = True
        if (x > 5).any().item():
            warnings.warn("large", stacklevel=2)
    return x


def corrects(model: Net, x: Tensor) -> Tensor:
    """Otherwise where its first data are large."""
    if not model.done:
        model.done = True
        if (x > 5).any().item():
            return x / 5
    return x


def initializes(model: Net, x: Tensor) -> Tensor:
    if not model.done:
        model.done = True
        with torch.no_grad():
            model.linear.weight.mul_(0.5).add_(x.mean(0))
    return x


def initializes_by_an_object(model: Net, x: Tensor) -> Tensor:
    if not told.done:
        told.done = True
        with torch.no_grad():
            model.linear.weight.mul_(0.5)
    return x


def initializes_by_an_object_within(model: Net, x: Tensor) -> Tensor:
    if not model.note.done:
        model.note.done = True
        return x * 2
    return x


def initializes_by_a_global(model: Net, x: Tensor) -> Tensor:
    global noted
    if not noted:
        noted = True
        return x * 2
    return x


def measures(model: Net, x: Tensor) -> Tensor:
    if model.size is None:
        model.size = x.shape[1]
    if not hasattr(model, "kind"):
        model.kind = str(x.dtype)
    return x * model.size


def marks_its_class(model: Net, x: Tensor) -> Tensor:
    if not type(model).ready:
        type(model).ready = True
    type(model).known = "yes"
    return x


def initializes_by_its_class(model: Net, x: Tensor) -> Tensor:
    if not type(model).ready:
        type(model).ready = True
        return x * 2
    return x


def initializes_by_what_its_class_lacks(model: Net, x: Tensor) -> Tensor:
    if not hasattr(type(model), "known"):
        type(model).known = "yes"
        with torch.no_grad():
            model.linear.weight.mul_(0.5)
    return x


def hooks(model: Net, x: Tensor) -> Tensor:
    if not model.done:
        model.done = True
        model.linear.register_forward_hook(shifts)
        model.linear.register_forward_pre_hook(scales, with_kwargs=True)
    return x


def takes_a_hook_off(model: Net, x: Tensor) -> Tensor:
    result = model.linear(x) if not model.done else x
    if not model.done:
        model.done = True
        model.shift.remove()
    return result.mean() + x


WITH_HOOKS = (hooks, takes_a_hook_off)
OF_CLASSES = (marks_its_class, initializes_by_its_class, initializes_by_what_its_class_lacks)
OF_OBJECTS = (initializes_by_an_object, initializes_by_an_object_within)
FIRST = (checks, corrects, initializes, *OF_OBJECTS, initializes_by_a_global, measures, *OF_CLASSES, *WITH_HOOKS)


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def left_by(model: Net) -> tuple[Any, ...]:
    return (
        noted,
        told.done,
        model.note.done,
        Net.ready,
        vars(Net).get("known"),
        *(list(table.values()) for name, table in vars(model.linear).items() if "_hooks" in name),
        *(vars(model).get(name) for name in ("done", "size", "kind")),
    )


def made(first: Callable[[Net, Tensor], Tensor]) -> tuple[Net, optim.Optimizer]:
    global noted
    noted = told.done = Net.ready = False
    if "known" in vars(Net):
        del Net.known
    torch.manual_seed(0)
    model = Net(first)
    return model, optim.SGD(model.parameters(), 0.1, momentum=0.9)


@pytest.mark.parametrize("of_large", [False, True])
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.filterwarnings("ignore:large")
def test_steps_and_what_they_leave_are_eagers(first: Callable[[Net, Tensor], Tensor], of_large: bool) -> None:
    torch.manual_seed(1)
    batches = [torch.randn(4, 3) + (9 if of_large and not at else 0) for at in range(3)]
    model, optimizer = made(first)
    before = left_by(model)
    step = lowtide.optimize(model, torch.zeros(4, 3), loss=losses_of, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
    assert left_by(model) == before, "what a step leaves is there after the first"
    mine = [(step(x), left_by(model)) for x in batches]
    eagers, optimizer = made(first)
    for x, (loss, left) in zip(batches, mine, strict=True):
        assert torch.equal(loss, eager_step(eagers, losses_of, optimizer, (x,), {}, Settings()))
        assert left == left_by(eagers) != before
    assert all(map(torch.equal, model.parameters(), eagers.parameters()))


@pytest.mark.parametrize("first", [checks, corrects, initializes_by_a_global, measures, initializes_by_its_class, *WITH_HOOKS])
@pytest.mark.filterwarnings("ignore:large")
def test_calls_without_gradients(first: Callable[[Net, Tensor], Tensor]) -> None:
    x = torch.randn(4, 3) + 9
    model = made(first)[0]
    call = lowtide.optimize(model, (torch.zeros(4, 3),), planning=lowtide.Planning(workspaces=False))
    mine = [call(x), call(x)]
    left = left_by(model)
    eagers = made(first)[0]
    with torch.no_grad():
        assert all(map(torch.equal, mine, [eagers(x), eagers(x)]))
    assert left == left_by(eagers)


def test_a_check_is_done_once_and_is_no_part_of_the_program() -> None:
    model, optimizer = made(checks)
    stages: list[Any] = []
    options: dict[str, Any] = {"workspaces": False, "check": "never", "callback": stages.append}
    step = lowtide.optimize(model, torch.zeros(4, 3), loss=losses_of, optimizer=optimizer, **in_values(**options))
    assert stages
    step(torch.zeros(4, 3))
    source = step.source
    stages.clear()
    step(torch.full((4, 3), 9.0))
    assert step.source == source
    assert not stages, "nothing is captured again"
    model.done = False
    with pytest.warns(UserWarning, match="large"):
        step(torch.full((4, 3), 9.0))
    assert model.done


def alternates(model: Net, x: Tensor) -> Tensor:
    model.done = not model.done
    return x


def flips_in_its_class(model: Net, x: Tensor) -> Tensor:
    type(model).ready = not type(model).ready
    return x


def flips_in_an_object(model: Net, x: Tensor) -> Tensor:
    told.done = not told.done
    return x


def hooks_each_time(model: Net, x: Tensor) -> Tensor:
    model.linear.register_forward_hook(shifts)
    return x


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (alternates, "module 'Net' changes its attribute 'done' in its forward.*buffer"),
        (hooks_each_time, "module 'linear' changes its attribute '_forward_hooks' in its forward"),
        (flips_in_its_class, "attribute 'ready' of the class Net.* was True and is False.*count outside of the step"),
        (flips_in_an_object, "attribute 'done' of a Noted.* was True and is False.*count outside of the step"),
    ],
)
def test_what_does_not_settle_is_refused(first: Callable[[Net, Tensor], Tensor], message: str) -> None:
    model, optimizer = made(first)
    before = left_by(model)
    with pytest.raises(lowtide.CaptureError, match=message):
        lowtide.optimize(model, torch.zeros(4, 3), loss=losses_of, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
    assert left_by(model) == before
