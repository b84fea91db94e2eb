"""A step that nobody holds any more goes at once, with the model, the optimizer and the arena behind it, as a plain loop's do."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import lowtide
from tests.arenas import skip_without_arenas


@pytest.fixture(autouse=True)
def _nothing_collected() -> Iterator[None]:
    """The collector would find what is in a circle, some time: many models later.

    The first optimizer of a process has torch import more, by what keeps the frames that it runs in.
    """
    optim.AdamW([nn.Parameter(torch.zeros(1))])
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def trained(model: nn.Module, optimizer: optim.Optimizer, x: Tensor, loss: Any = square, **arguments: Any) -> lowtide.Step:
    step = lowtide.optimize(model, x, loss=loss, optimizer=optimizer, **arguments)
    step(x), step(x)
    return step


def of_other_shapes(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    step = trained(model, optimizer, x)
    step(x[:5]), step(x)


def in_a_range(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    step = trained(model, optimizer, x, shapes=lowtide.Shapes({0: {0: (2, 12)}}))
    step(x[:5]), step(x[:3])


def with_a_failed_batch(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    step = trained(model, optimizer, x)
    for wrong in (x[:, :5], x[:3, :4]):
        with suppress(RuntimeError), pytest.warns(UserWarning, match="run as the loop would run it"):
            step(wrong)


def refused_of_another_shape(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    step = trained(model, optimizer, x, shapes=lowtide.Shapes(on_new_shape="error"))
    with suppress(lowtide.BatchError):
        step(x[:5])


def logging(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    losses, total = [], [0.0]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        losses.append(value.item())
        total[0] += value.item()
        return value

    trained(model, optimizer, x, loss)


def refused(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        return value * 2 if value > 0.1 else value.exp()

    with suppress(lowtide.CaptureError):
        trained(model, optimizer, x, loss)


def too_large(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    with suppress(lowtide.BudgetError):
        trained(model, optimizer, x, memory="1%")


def in_an_arena(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    skip_without_arenas()
    assert trained(model, optimizer, x, run=lowtide.Run(arena="always")).arena.live_tensors == 0


def called(model: nn.Module, optimizer: optim.Optimizer, x: Tensor, **arguments: Any) -> None:
    step = lowtide.optimize(model, x, **arguments)
    step(x), step(x)


@pytest.mark.parametrize(
    "use",
    [
        trained, of_other_shapes, in_a_range, with_a_failed_batch, refused_of_another_shape, logging, refused, too_large, in_an_arena,
        called,
        pytest.param(lambda *given: trained(*given).verify(given[2]), id="verified"),
        pytest.param(lambda *given: trained(*given, training=lowtide.Training(accumulate=2)), id="in micro-batches"),
        pytest.param(lambda *given: called(*given, exact=False), id="not exact"),
        pytest.param(lambda *given: lowtide.optimize(given[0], given[2], loss=square, optimizer=given[1]), id="never called"),
        pytest.param(lambda *given: lowtide.explain(given[0], given[2], loss=square, optimizer=given[1]), id="explained"),
    ],
)  # fmt: skip
def test_nothing_stays(use: Callable[..., Any]):
    def run() -> list[weakref.ref[Any]]:
        model, x = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3)), torch.randn(8, 6)
        optimizer = optim.AdamW(model.parameters())
        use(model, optimizer, x)
        return [weakref.ref(each) for each in (model, optimizer, *model.parameters())]

    # What a first use imports may keep the frames that it runs in, as torch's does: a circle keeps them each time.
    assert any(all(each() is None for each in run()) for _ in range(3))
