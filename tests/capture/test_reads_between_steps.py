"""What a loss reads beside its model, changed between two steps, is noticed by the very next call, or was announced at the capture."""

import collections
import contextvars
import functools
import math
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from tests.api.networks import sgd

N = types.SimpleNamespace
_helpers = types.ModuleType("helpers_of_a_loss")
exec("def helper(number):\n    return number * 2.0\n", _helpers.__dict__)

Case = tuple[Callable[[], float], Callable[[], Any]]  # what is read in each step, and what changes it
_KEPT: list[Any] = []  # what weak references lead to
_CASES: dict[str, Callable[[], Case]] = {}


def _case(make: Callable[[], Case]) -> Callable[[], Case]:
    _CASES[make.__name__.strip("_")] = make
    return make


class _Holder:
    w = 1.0


def _function(**attributes: Any) -> Callable[[], float]:
    def read(w: float = 1.0, *, v: float = 1.0) -> float:
        return w * v * getattr(read, "u", 1.0)

    read.__dict__.update(attributes)
    return read


def _tripled() -> float:
    return 3.0


def _put(holder: Any, name: str, item: Any) -> Callable[[], None]:
    return lambda: setattr(holder, name, item)


@_case
def _attribute_of_a_function() -> Case:
    read = _function(u=2.0)
    return read, _put(read, "u", 3.0)


@_case
def _attribute_that_was_not_there() -> Case:
    read = _function()
    return read, _put(read, "u", 3.0)


@_case
def _attribute_of_a_function_in_a_list() -> Case:
    held = [_function(w=2.0)]
    return lambda: held[0].w, _put(held[0], "w", 3.0)  # type: ignore[attr-defined]


@_case
def _defaults() -> Case:
    read = _function()
    return read, _put(read, "__defaults__", (3.0,))


@_case
def _defaults_by_keyword() -> Case:
    read = _function()
    return read, _put(read, "__kwdefaults__", {"v": 3.0})


@_case
def _one_default_by_keyword() -> Case:
    read = _function()
    return read, lambda: read.__kwdefaults__.update(v=3.0)  # type: ignore[attr-defined]


@_case
def _code() -> Case:
    def read() -> float:
        return 1.0

    return read, _put(read, "__code__", _tripled.__code__)


def _large(container: Any, at: Any = 1100) -> Callable[[], Case]:
    def make() -> Case:
        held = container()
        return lambda: held[at], lambda: held.__setitem__(at, 3.0)

    return make


_CASES["list"] = _large(lambda: [1.0] * 1200)
_CASES["dictionary"] = _large(lambda: dict.fromkeys(range(1200), 1.0))
_CASES["dictionary of texts"] = _large(lambda: {str(number): 1.0 for number in range(1200)}, "1100")
_CASES["counter"] = _large(lambda: collections.Counter(range(1200)))
_CASES["deque"] = _large(lambda: collections.deque([1.0] * 12_000), 6000)
_CASES["array"] = _large(lambda: np.ones(5000))
_CASES["list of functions"] = _large(lambda: [*[math.sqrt] * 1100, 1.0, *[math.sqrt] * 100])
_CASES["huge list"] = _large(lambda: [1.0] * 300_000)
_CASES["huge dictionary"] = _large(lambda: dict.fromkeys(range(300_000), 1.0))
_CASES["huge array"] = _large(lambda: np.ones(300_000))
_CASES["huge list of objects"] = _large(lambda: [*[math.sqrt] * 1100, 1.0, *[math.sqrt] * 20_000])


@_case
def _set() -> Case:
    held = {*range(1200)}
    return lambda: 1.0 if 7 in held else 3.0, lambda: (held.discard(7), held.add(5000))


@_case
def _lists_in_a_list() -> Case:
    held = [[1.0] * 200 for _ in range(100)]
    return lambda: held[90][3], lambda: held[90].__setitem__(3, 3.0)


@_case
def _lists_in_a_large_tuple() -> Case:
    held = tuple([1.0] for _ in range(1200))
    return lambda: held[1100][0], lambda: held[1100].__setitem__(0, 3.0)


@_case
def _objects_in_a_large_list() -> Case:
    held = [_Holder() for _ in range(1200)]
    return lambda: held[1100].w, _put(held[1100], "w", 3.0)


@_case
def _arrays_in_a_list() -> Case:
    held = [np.ones(5), np.array([1.0, "text"], dtype=object)]
    return lambda: float(held[0][2]) * held[1][0], lambda: held[1].__setitem__(0, 3.0)


@pytest.mark.parametrize("leaf", [1.0, math.sqrt], ids=["plain", "not plain"])
def _deep(leaf: Any, depth: int) -> Case:
    top: dict[str, Any] = {"w": 1.0, "leaf": leaf}
    inner = top
    for _ in range(depth):
        top = {"down": top}

    def read() -> float:
        at = top
        while "down" in at:
            at = at["down"]
        return at["w"]

    return read, lambda: inner.update(w=3.0)


_CASES["deep dictionary of numbers"] = lambda: _deep(1.0, 6)
_CASES["deep dictionary with a function"] = lambda: _deep(math.sqrt, 12)
_CASES["dictionary that is too deep"] = lambda: _deep(math.sqrt, 60)


@_case
def _deep_namespace() -> Case:
    inner = N(w=1.0)
    top = N(a=N(b=N(c=N(d=N(e=inner)))))
    return lambda: top.a.b.c.d.e.w, _put(inner, "w", 3.0)


@_case
def _object_in_a_deep_dictionary() -> Case:
    inner = _Holder()
    top = {"a": {"b": {"c": {"d": {"e": {"f": inner}}}}}}
    return lambda: top["a"]["b"]["c"]["d"]["e"]["f"].w, _put(inner, "w", 3.0)


@_case
def _answer_that_is_remembered() -> Case:
    held = [1.0]

    @functools.lru_cache
    def read(at: int) -> float:
        return held[at]

    read(0)
    held[0] = 3.0  # the program is captured after that, and finds the answer of before
    return lambda: read(0), read.cache_clear


@_case
def _answer_that_was_remembered_anew() -> Case:
    held = [1.0]

    @functools.cache
    def read(at: int) -> float:
        return held[at]

    read(0)
    held[0] = 3.0
    return lambda: read(0), lambda: (read.cache_clear(), read(0))


def _referred(refer: Callable[[Any], Any], read: Callable[[Any], float]) -> Callable[[], Case]:
    def make() -> Case:
        _KEPT.append(item := _Holder())
        reference = refer(item)
        return lambda: read(reference), _put(item, "w", 3.0)

    return make


_CASES["weak reference"] = _referred(weakref.ref, lambda reference: reference().w)
_CASES["weak proxy"] = _referred(weakref.proxy, lambda proxy: proxy.w)


@_case
def _reference_to_what_is_gone() -> Case:
    held = [_Holder()]
    reference = weakref.ref(held[0])
    owner = weakref.ref(held[0], lambda _: None)
    _KEPT.append(held)
    return lambda: 3.0 if reference() is None else 1.0, lambda owner=owner: _KEPT[-1].clear()


@_case
def _read_only_view() -> Case:
    behind = {"w": {"v": 1.0}}
    view = types.MappingProxyType(behind)
    return lambda: view["w"]["v"], lambda: behind["w"].update(v=3.0)


@_case
def _property_of_a_metaclass() -> Case:
    class Meta(type):
        @property
        def w(cls) -> float:
            return cls._w  # type: ignore[attr-defined,no-any-return]

    class Held(metaclass=Meta):
        _w = 1.0

    return lambda: Held.w, _put(Held, "_w", 3.0)


@_case
def _attribute_that_a_method_of_the_class_reads() -> Case:
    class Held:
        _w = 1.0

        @classmethod
        def w(cls) -> float:
            return cls._w

    return lambda: Held.w(), _put(Held, "_w", 3.0)


@_case
def _context() -> Case:
    variable = contextvars.ContextVar("variable", default=1.0)
    return variable.get, lambda: variable.set(3.0)


@_case
def _list_in_a_context() -> Case:
    variable = contextvars.ContextVar[list[float]]("variable", default=[1.0])
    return lambda: variable.get()[0], lambda: variable.get().__setitem__(0, 3.0)


@_case
def _thread() -> Case:
    own = threading.local()
    own.w = [1.0]
    return lambda: own.w[0], _put(own, "w", [3.0])


def _patched(owner: Any, name: str, instead: Any, read: Callable[[], float]) -> Callable[[], Case]:
    return lambda: (read, _put(owner, name, instead))


def _imports_itself() -> float:
    from helpers_of_a_loss import helper  # type: ignore[import-not-found]

    return float(helper(1.0))


_CASES["function of torch"] = _patched(F, "relu", lambda number: number * 3, lambda: F.relu(torch.ones(())))  # type: ignore[arg-type]
_CASES["method of torch"] = _patched(torch.Tensor, "relu", lambda number: number * 3, lambda: torch.Tensor.relu(torch.ones(())))  # type: ignore[arg-type]
_CASES["function of Python's"] = _patched(math, "sqrt", lambda _: 3.0, lambda: math.sqrt(4.0))
_CASES["function of a module"] = _patched(_helpers, "helper", lambda _: 3.0, lambda: _helpers.helper(1.0))
_CASES["function that is imported within"] = _patched(_helpers, "helper", lambda _: 3.0, _imports_itself)


class _Scaled(nn.Module):
    """A network that reads what it scales by, too, from one of its attributes."""

    def __init__(self, read: Callable[[], float]) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(3, 2), read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.read()


def _trained(read: Callable[[], float], change: Callable[[], Any], in_model: bool, captured: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = _Scaled(read) if in_model else nn.Linear(3, 2)
    optimizer, x = sgd(model), torch.randn(4, 3)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean() if in_model else model(x).square().mean() * read()

    def eager(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        (result := loss(model, x)).backward()
        optimizer.step()
        return result.detach()

    planning, run = lowtide.Planning(progress=False, workspaces=False), lowtide.Run(check="never", arena=False)
    step = lowtide.optimize(model, (x,), loss=loss, optimizer=optimizer, planning=planning, run=run) if captured else eager
    losses = [step(x).clone()]
    change()
    return [*losses, step(x).clone(), step(x).clone()]


@pytest.mark.parametrize("in_model", [False, True], ids=["loss", "model"])
@pytest.mark.parametrize("case", _CASES)
def test_a_change_is_noticed_or_was_announced(case: str, in_model: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "helpers_of_a_loss", _helpers)
    for owner, name in ((F, "relu"), (torch.Tensor, "relu"), (math, "sqrt"), (_helpers, "helper")):
        monkeypatch.setattr(owner, name, before := getattr(owner, name))  # put back at the end
        assert before
    expected = contextvars.copy_context().run(_trained, *_CASES[case](), in_model, False)
    for owner, name in ((F, "relu"), (torch.Tensor, "relu"), (math, "sqrt"), (_helpers, "helper")):
        monkeypatch.setattr(owner, name, _BEFORE[owner, name])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        losses = contextvars.copy_context().run(_trained, *_CASES[case](), in_model, True)
    told = [str(each.message) for each in said if "is not compared in each call" in str(each.message)]
    assert bool(told) == (case.startswith("huge") or "too deep" in case)
    assert told or all(map(torch.equal, losses, expected))
    assert not torch.equal(expected[0], expected[1])
