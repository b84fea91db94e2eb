"""Texts that the user's classes make of numbers of the step: `str(meter)`, `f"{meter}"`, `"%s" % meter`, `print(meter)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import lowtide
from tests.leaving import Net, check, square


class Average:
    def __init__(self) -> None:
        self.last, self.total, self.count = 0.0, 0.0, 0
        self.texts: list[str] = []

    def update(self, number: float) -> None:
        self.last = number
        self.total += number
        self.count += 1

    def __str__(self) -> str:
        return f"{self.last:.3f} ({self.total / self.count:.3f})"


class Shown(Average):
    __str__ = object.__str__

    def __repr__(self) -> str:
        return f"<{self.total:.3f} of {self.count}>"


class Formatted(Average):
    def __format__(self, spec: str) -> str:
        return f"{self.total:.3f}{spec}"


def in_each_way(average: Average) -> None:
    average.texts += [str(average), f"loss {average}", "loss {}".format(average)]  # noqa: UP032
    average.texts += ["loss %s of %d" % (average, 3), ", ".join(map(str, [average, average]))]  # noqa: UP031


def by_its_repr(average: Average) -> None:
    average.texts += [str(average), repr(average), f"{average!r} {average}"]


def by_a_format(average: Average) -> None:
    average.texts += [f"{average:!}", format(average, "?")]


@pytest.mark.parametrize(("kind", "use"), [(Average, in_each_way), (Shown, by_its_repr), (Formatted, by_a_format)])
def test_a_text_that_a_class_makes_is_made_by_each_step(kind: type[Average], use: Callable[[Average], None]) -> None:
    def make() -> tuple[Net, Callable[..., Any], Any]:
        average = kind()

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            value = square(model, x)
            average.update(value.item())
            use(average)
            return value

        return Net(), loss, average.texts

    check(make)


class Phase:
    def __init__(self) -> None:
        self.at: Any = 0.0

    def __str__(self) -> str:
        return f"at {self.at:>9.9}"


@pytest.mark.parametrize(("begun", "done"), [(1.0, lambda value: value.item()), ("forward", lambda value: "done")])
def test_what_is_printed_of_an_object_is_what_it_was_then(
    begun: Any, done: Callable[[Tensor], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(eagerly: bool) -> str:
        torch.manual_seed(0)
        model, phase = Net(), Phase()

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            phase.at = begun
            print("now", phase)
            value = square(model, x)
            phase.at = done(value)
            print("then", phase)
            return value

        optimizer, x = optim.SGD(model.parameters(), lr=0.1), torch.rand(5, 3)
        planning = lowtide.Planning(workspaces=False)
        step = None if eagerly else lowtide.optimize(model, (x,), loss=loss, optimizer=optimizer, planning=planning)
        for _ in range(3):
            if step is not None:
                step(x)
                continue
            optimizer.zero_grad()
            loss(model, x).backward()
            optimizer.step()
        return capsys.readouterr().out

    assert printed(eagerly=False) == printed(eagerly=True)
