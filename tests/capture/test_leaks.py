"""No fake tensor outlives a capture: what keeps one is named and the capture refused; `after_backward` hands values back instead."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import clip_grad_norm_

import lowtide

pytestmark = pytest.mark.usefixtures("all_is_looked_at")

norms: set[Any] = set()  # no list: what goes there is put there by each step
HERE = r"\S*test_leaks\.py:\d+"


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def clipped(model: nn.Module) -> Tensor:
    return clip_grad_norm_(model.parameters(), 1.0, foreach=False)


def make(after: Callable[[nn.Module], Any] | None = None, loss: Callable[..., Any] = square, optimizer: Any = optim.Adam) -> lowtide.Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return lowtide.optimize(
        model,
        torch.ones(5, 3),
        loss=loss,
        optimizer=optimizer(model.parameters(), lr=0.1),
        training=lowtide.Training(after_backward=after),
        planning=lowtide.Planning(workspaces=False),
    )


def fakes() -> set[int]:
    return {id(item) for item in gc.get_objects() if issubclass(type(item), FakeTensor)}


def into_global(model: nn.Module) -> None:
    norms.add(clipped(model))


def into_closure() -> Callable[[nn.Module], None]:
    mine: dict[str, set[Tensor]] = {"norms": set()}
    return lambda model: mine["norms"].add(clipped(model))


def into_variable() -> Callable[[nn.Module], None]:
    last = None

    def after(model: nn.Module) -> None:
        nonlocal last
        last = clipped(model)

    return after


class Meter:
    def __init__(self) -> None:
        self.last: Any = object()

    def __call__(self, model: nn.Module) -> None:
        self.before, self.last = self.last, clipped(model)  # what an earlier step has left: no step would put it there


@pytest.mark.parametrize(
    ("after", "named"),
    [
        (lambda: into_global, r"the global 'norms' of \S*test_leaks"),
        (into_closure, r"the variable 'mine' of into_closure\.<locals>\.<lambda>"),
        (into_variable, r"the variable 'last' of into_variable.<locals>\.after"),
        (Meter, "attribute 'last' of a Meter"),
    ],
    ids=["global", "closure", "variable", "attribute"],
)
def test_what_keeps_a_tensor_is_named_with_the_line_and_a_remedy(after, named):
    with pytest.raises(lowtide.CaptureError, match=rf"{named} \(made at \S+:\d+\) still holds.*value, norm = step\(\.\.\.\)"):
        make(after())
    assert not norms


def test_what_a_capture_that_fails_has_touched_is_put_back():
    history: dict[str, Any] = {"norms": [1.0], "last": "none", "seen": {3}}
    meter, count, known = Meter(), 0, fakes()
    last = meter.last

    def after(model: nn.Module) -> None:
        nonlocal count
        count += 1
        history["norms"].append(clipped(model))
        history["last"] = history["new"] = clipped(model)
        history["seen"].add(4)
        meter(model)
        norms.add(count)

    with pytest.raises(lowtide.CaptureError):
        make(after)
    assert history == {"norms": [1.0], "last": "none", "seen": {3}}
    assert (meter.last, count, norms) == (last, 0, set())
    gc.collect()
    assert fakes() <= known  # a test that failed before may keep some


def test_an_object_in_the_batch_that_a_program_fills_is_put_back():
    class Fills(nn.Module):
        def forward(self, x: Tensor, cache: Any) -> Tensor:
            cache.last, cache.items = x + 1, [x + 2]
            return x

    class Cache:
        last = None

    cache = Cache()
    with pytest.raises(lowtide.CaptureError, match=r"changes what the batch holds, at batch\[0\]\[1\]"):
        lowtide.optimize(Fills(), (torch.ones(2), cache), planning=lowtide.Planning(workspaces=False))
    assert vars(cache) == {}


def test_what_a_loss_or_a_module_keeps_is_found():
    kept: set[Tensor] = set()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        kept.add(model(x).detach())
        return square(model, x)

    with pytest.raises(lowtide.CaptureError, match=rf"the variable 'kept' of .*made at {HERE}"):
        make(loss=loss)
    assert not kept

    class Lazy(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return (row * 2 for row in [x + 1])

    with pytest.raises(lowtide.CaptureError, match="the generator '<genexpr>'"):
        lowtide.optimize(Lazy(), torch.ones(2), planning=lowtide.Planning(workspaces=False))


_LIBRARY = """
import functools, torch

@functools.lru_cache(maxsize=8)
def angles(size):
    return torch.arange(size)

def called_by(function):
    return functools.wraps(function)(lambda *args: function(*args))

wrapped = called_by(functools.cache(lambda size: torch.ones(size)))

class Rotation(torch.nn.Module):
    @staticmethod
    @functools.cache
    def shift(size):
        return torch.zeros(size)

    def forward(self, x):
        return x * angles(2) * wrapped(2) + self.shift(2)
"""


def test_memoised_functions_forget():
    """What they gave follows from what a step leaves alone, or from what the step itself has made and gives them."""
    rates, frozen = torch.arange(4.0), nn.Linear(2, 2).requires_grad_(False)

    @functools.lru_cache
    def mask(size: int) -> Tensor:
        return torch.ones(size, size).tril() * rates[None, :size].sin() * frozen.weight.softmax(0)

    @functools.cache
    def positions(mask: Tensor) -> dict[str, Tensor]:
        return {"rows": mask.cumsum(0), "columns": mask.cumsum(1)}

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        at = positions(x > 0.5)
        return (model(x) @ mask(2) @ frozen.weight).sum() * (at["rows"] + at["columns"]).sum()

    model = nn.Sequential(nn.Linear(3, 2), frozen)
    optimizer = optim.SGD(model[0].parameters(), 0.1)
    step = lowtide.optimize(model, torch.ones(5, 3), loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
    assert type(mask(2)) is Tensor
    x = torch.rand(5, 3)
    assert torch.equal(loss(model, x), step(x))


def test_functions_of_a_library_find_no_answer_of_a_refused_program():
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ArithmeticError("expected another x")

    library = types.ModuleType("rotations")
    library.__file__ = "/site-packages/rotations.py"
    exec(compile(_LIBRARY, library.__file__, "exec"), vars(library))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "rotations", library)
        with pytest.raises(lowtide.CaptureError, match="expected another x"):
            lowtide.optimize(nn.Sequential(library.Rotation(), Failing()), torch.ones(2), planning=lowtide.Planning(workspaces=False))
    assert type(library.angles(2)) is type(library.Rotation.shift(2)) is type(library.wrapped(2)) is Tensor


@pytest.mark.parametrize(
    ("answer", "use", "why"),
    [
        (lambda model, x: torch.randn(2), torch.sum, "remembers .* is drawn at random"),
        (lambda model, x: (model[0].weight.detach() * 2,), lambda held: held[0].sum(), "remembers .* follows from parameter .*weight"),
        (lambda model, x: {"norm": x.norm()}, lambda held: held["norm"], "remembers .* follows from input batch_0"),
        (lambda model, x: torch.ones(2), lambda held: held.mul_(2).sum(), rf"mul_.* at {HERE} writes into what .* remembers"),
        (lambda model, x: [torch.ones(2)], lambda held: held[0][0].add_(1), r"add_.* writes into what .* remembers"),
    ],
    ids=["drawn", "of a parameter", "of a batch", "written", "written in part"],
)
def test_a_remembered_answer_that_each_step_would_make_anew_is_refused(answer, use, why):
    """Eager computes it once. Called before the step, it is a constant of the step, written or not."""
    answer_of = functools.lru_cache(None if use is torch.sum else 128)(answer)
    with pytest.raises(lowtide.CaptureError, match=why):
        make(loss=lambda model, x: model(x).sum() * use(answer_of(model, x)))
    assert not answer_of.cache_info().currsize


def test_an_answer_that_was_remembered_before_is_eagers():
    def run(train: Callable[..., Callable[[Tensor], Any]]) -> list[Any]:
        torch.manual_seed(0)
        model, given = nn.Sequential(nn.Linear(3, 2)), torch.ones(5, 3)
        answer = functools.lru_cache(lambda size: torch.randn(size))
        answer(2)
        step = train(model, lambda model, x: (model(x) + answer(2)).square().sum() * answer(2).mul_(0.5).sum(), given)
        return [*(step(given).detach() for _ in range(3)), answer(2), *model.parameters()]

    def eager_step(model: nn.Module, loss: Any, given: Tensor) -> Callable[[Tensor], Any]:
        optimizer = optim.SGD(model.parameters(), 0.1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            value = loss(model, x)
            value.backward()
            optimizer.step()
            return value

        return step

    def planned(model: nn.Module, loss: Any, given: Tensor) -> Callable[[Tensor], Any]:
        optimizer = optim.SGD(model.parameters(), 0.1)
        return lowtide.optimize(model, given, loss=loss, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))

    assert all(map(torch.equal, run(eager_step), run(planned)))


@pytest.mark.parametrize("optimizer", [optim.SGD, optim.Adam])
def test_nothing_fake_is_left_after_a_capture(optimizer):
    known = fakes()
    step = make(clipped, optimizer=optimizer)
    step(torch.ones(5, 3))
    gc.collect()
    assert fakes() <= known  # a test that failed before may keep some


def test_a_capture_leaves_nothing_for_the_collector_to_find():
    """Collecting takes long in a large process: a capture that nobody else holds frees its tensors itself."""
    gc.collect()
    known = fakes()
    gc.disable()
    try:
        make(clipped)
        left = fakes()
    finally:
        gc.enable()
    assert left <= known


def eager(after: Callable[[nn.Module], Any]) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    returned = []
    for _ in range(3):
        optimizer.zero_grad()
        value = square(model, torch.ones(5, 3))
        value.backward()
        returned.append((value.detach(), after(model)))
        optimizer.step()
    return returned


@pytest.mark.parametrize(
    "after",
    [
        clipped,
        lambda model: clipped(model).item(),
        lambda model: clipped(model).item() * 2,
        lambda model: f"{clipped(model).item():.2f}",
        lambda model: (clipped(model).item() > 1, clipped(model).item() == 1),
        lambda model: {
            "norm": clipped(model),
            "numbers": [clipped(model).item(), 7],
            "of": [p.grad.abs().max() for p in model.parameters()],
        },
    ],
    ids=["tensor", "number", "twice", "text", "answers", "both"],
)
def test_what_after_backward_returns_comes_beside_the_loss(after):
    step = make(after)
    for value, expected in eager(after):
        found, returned = step(torch.ones(5, 3))
        assert torch.equal(found, value)
        assert repr(returned) == repr(expected)


@pytest.mark.parametrize("after", [lambda model: None, lambda model: model, lambda model: [None for _ in model.parameters()]])
def test_what_is_neither_tensor_nor_number_is_not_returned(after):
    assert type(make(after)(torch.ones(5, 3))) is Tensor


@pytest.mark.parametrize(
    "use",
    [lambda n: 2 if n > 1 else 3, bool, str, repr, float, lambda n: {n: 1}],
    ids=range(6),
)
def test_a_number_that_is_not_known_yet_is_not_computed_with(use):
    with pytest.raises(lowtide.CaptureError, match=rf"control flow depends on data: a number read from a tensor .* at {HERE}"):
        make(lambda model: use(clipped(model).item()))


@pytest.mark.parametrize("attempt", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_a_step_says_why_it_cannot_be_copied(attempt):
    with pytest.raises(lowtide.StepError, match=r"cannot be pickled or copied: .*step\.plan\.save\(path\).*plan=path"):
        attempt(make())
