"""What lies behind wrappers, hooks and partials is found, and goes on there as in eager."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor, nn

from tests.leaving import Net, check, square


def wrapped_by_a_library() -> Any:
    """What it changes lies behind functions of Python's own library."""
    depth, names, calls = {"now": 0}, list[Any](), {"all": 0}

    @contextlib.contextmanager
    def scope(name: str) -> Iterator[None]:
        depth["now"] += 1
        names.append((name, depth["now"]))
        yield
        depth["now"] -= 1

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def within(*args: Any) -> Any:
            calls["all"] += 1
            return function(*args)

        return within

    @counted
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with scope("outer"), scope("inner"):
            return square(model, x)

    return Net(), loss, [names, depth, calls]


def kept_by_a_hook_on_a_gradient() -> Any:
    norms, total, model = list[Any](), {"sum": 0.0}, Net()

    def note(gradient: Tensor) -> None:
        norms.append(gradient.norm().item())
        total["sum"] += gradient.abs().max().item()

    model.first.weight.register_hook(note)
    return model, square, [norms, total]


def given_by_a_partial() -> Any:
    seen = list[Any]()

    def loss(model: nn.Module, x: Tensor, log: list[Any], scale: float) -> Tensor:
        value = square(model, x) * scale
        log.append(value.item())
        return value

    return Net(), functools.partial(loss, log=seen, scale=2.0), seen


def attributes_of_the_function_itself() -> Any:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        loss.calls += 1
        loss.last = value.item()
        return value * (1 + 1 / loss.calls)

    loss.calls, loss.last = 0, 0.0
    return Net(), loss, loss.__dict__


@pytest.mark.parametrize(
    "make", [wrapped_by_a_library, kept_by_a_hook_on_a_gradient, given_by_a_partial, attributes_of_the_function_itself]
)
def test_what_lies_behind_functions_is_found(make):
    check(make)
