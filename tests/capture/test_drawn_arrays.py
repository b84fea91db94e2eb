"""Arrays that a program draws from NumPy's generator: where each step puts its own, and what may not be written into one."""

from __future__ import annotations

import random
from collections.abc import Callable
from random import uniform
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import standard_normal
from torch import Tensor

import lowtide
from tests.leaving import Net, square, stepping


def test_an_attribute_holds_the_array_of_the_last_step() -> None:
    model = Net()

    def loss(model: Net, x: Tensor) -> Tensor:
        model.weights = np.random.rand(2)
        return square(model, x)

    step = stepping(model, loss, torch.optim.SGD(model.parameters(), 0.1), torch.rand(5, 3))
    for seed in range(3):
        np.random.seed(seed)
        step()
        np.random.seed(seed)
        assert type(model.weights) is np.ndarray
        assert (model.weights == np.random.rand(2)).all()


@pytest.mark.parametrize(
    "draw",
    [
        lambda: np.random.choice([1.5, 2.5]),
        lambda: np.random.permutation(4)[0],
        lambda: np.random.rand(3).mean() * 2,
        lambda: np.random.rand(2)[0] < 0.5,
        lambda: {"most": np.random.normal(size=2).max()},
    ],
)
def test_a_number_that_is_kept_is_numpys_where_eagers_is(draw: Callable[[], Any]) -> None:
    kept, model = list[Any](), Net()

    def loss(model: Net, x: Tensor) -> Tensor:
        kept.append(drawn := draw())
        return square(model, x) * (1 if isinstance(drawn, dict) else drawn)

    step = stepping(model, loss, torch.optim.SGD(model.parameters(), 0.1), torch.rand(5, 3))
    for seed in range(3):
        np.random.seed(seed)
        step()
        np.random.seed(seed)
        assert repr(kept[-1]) == repr(draw())


def test_functions_that_were_imported_by_name_draw_in_each_step() -> None:
    model, kept = Net(), list[float]()

    def loss(model: Net, x: Tensor) -> Tensor:
        kept.append(uniform(0.5, 2.0) + standard_normal())
        return square(model, x) * kept[-1]

    random.seed(1)
    np.random.seed(1)
    step = stepping(model, loss, torch.optim.SGD(model.parameters(), 0.1), torch.rand(5, 3))
    for _ in range(3):
        step()
    random.seed(1)
    np.random.seed(1)
    assert kept == [uniform(0.5, 2.0) + standard_normal() for _ in range(3)]


def sorted_in_place(array: Any) -> Any:
    array.sort()
    return array


def written_by_a_function(array: Any) -> Any:
    return np.multiply(array, 2, out=array)


def with_a_view(array: Any) -> Any:
    view = array[1:]
    array *= 2
    return view


def written_by_torch(array: Any) -> Any:
    torch.from_numpy(array).mul_(2)
    return array


@pytest.mark.parametrize("write", [sorted_in_place, written_by_a_function, with_a_view, written_by_torch])
def test_writes_that_others_may_see_of_a_drawn_array_are_refused(write: Callable[[Any], Any]) -> None:
    kept, model = list[Any](), Net()

    def loss(model: Net, x: Tensor) -> Tensor:
        kept.append(write(np.random.rand(3)))
        return square(model, x)

    with pytest.raises(lowtide.CaptureError, match="writes into an array that it draws"):
        stepping(model, loss, torch.optim.SGD(model.parameters(), 0.1), torch.rand(5, 3))
