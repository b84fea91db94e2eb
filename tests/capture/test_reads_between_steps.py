"""What a loss reads beside its model, changed between two steps, is noticed by the very next call, or was announced at the capture."""

import collections
import contextvars
import functools
import math
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
from tests.reads import HELPERS, Case, are_alike

N = types.SimpleNamespace

_KEPT: list[Any] = []  # what weak references lead to
_CASES: dict[str, Callable[[], Case]] = {}


def _case(make: Callable[[], Case]) -> Callable[[], Case]:
    _CASES[make.__name__.strip("_")] = make
    return make


class _Holder:
    w = 1.0

    def read(self) -> float:
        return self.w


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
    return lambda: held[0].w, _put(held[0], "w", 3.0)


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
    return read, lambda: read.__kwdefaults__.update(v=3.0)


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
def _answer_of_a_partial_that_is_remembered() -> Case:
    held = [1.0]
    read = functools.lru_cache(functools.partial(held.__getitem__, 0))  # without a name
    read()
    held[0] = 3.0
    return read, read.cache_clear


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
    return lambda: 3.0 if reference() is None else 1.0, held.clear


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
            return cls._w

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


def _config() -> type:
    """A class of settings, as programs have them, with classes within it."""

    class Config:
        w = 1.0

        class Inner:
            w = 1.0

            class Most:
                w = 1.0

    return Config


@_case
def _class_within_a_class_that_an_object_has() -> Case:
    held = N(config=_config())
    return lambda: held.config.Inner.Most.w, _put(held.config.Inner.Most, "w", 3.0)


@_case
def _class_within_a_class_by_getattr() -> Case:
    held = _config()
    return lambda: getattr(held, "In" + "ner").w, _put(held.Inner, "w", 3.0)  # type: ignore[attr-defined]


@_case
def _class_within_the_class_of_an_object() -> Case:
    held = _config()()
    return lambda: type(held).Inner.w, _put(type(held).Inner, "w", 3.0)


@_case
def _view_of_a_dictionary() -> Case:
    table = {"w": 1.0}
    items = table.items()
    return lambda: dict(items)["w"], lambda: table.update(w=3.0)


@_case
def _view_of_memory() -> Case:
    array = np.ones(3)
    memory = memoryview(array)
    return lambda: float(memory[1]), lambda: array.__setitem__(1, 3.0)


@_case
def _number_of_keys() -> Case:
    table = collections.OrderedDict(w=1.0)
    keys = table.keys()
    return lambda: float(len(keys)), lambda: table.update(v=3.0)


@_case
def _context() -> Case:
    variable = contextvars.ContextVar("variable", default=1.0)
    return variable.get, lambda: variable.set(3.0)


@_case
def _list_in_a_context() -> Case:
    held = [1.0]
    variable = contextvars.ContextVar[list[float]]("variable", default=held)
    return lambda: variable.get()[0], lambda: variable.get().__setitem__(0, 3.0)


@_case
def _thread() -> Case:
    own = threading.local()
    own.w = [1.0]
    return lambda: own.w[0], _put(own, "w", [3.0])


def _patched(owner: Any, name: str, instead: Any, read: Callable[[], float]) -> Callable[[], Case]:
    return lambda: (read, _put(owner, name, instead))


def _imports_itself() -> float:
    from helpers_of_a_loss import helper

    return float(helper(1.0))


_CASES["function of torch"] = _patched(F, "relu", lambda number: number * 3, lambda: F.relu(torch.ones(())))
_CASES["method of torch"] = _patched(torch.Tensor, "relu", lambda number: number * 3, lambda: torch.Tensor.relu(torch.ones(())))
_CASES["function of Python's"] = _patched(math, "sqrt", lambda _: 3.0, lambda: math.sqrt(4.0))
_CASES["function of a module"] = _patched(HELPERS, "helper", lambda _: 3.0, lambda: HELPERS.helper(1.0))
_CASES["function that is imported within"] = _patched(HELPERS, "helper", lambda _: 3.0, _imports_itself)


class _Scaled(nn.Module):
    """A network that reads from one of its attributes what it scales by."""

    def __init__(self, held: Any, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.linear, self.held, self.read = nn.Linear(3, 2), held, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.read(self.held)


@pytest.mark.parametrize("case", _CASES)
def test_a_change_of_what_the_loss_reads_is_noticed_or_was_announced(case: str) -> None:
    are_alike(lambda: (nn.Linear(3, 2), *_CASES[case]()), announced=case.startswith("huge") or "too deep" in case)


def _local() -> threading.local:
    own = threading.local()
    own.w = 1.0
    return own


def _weak() -> weakref.ref[_Holder]:
    _KEPT.append(item := _Holder())
    return weakref.ref(item)


_HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], Any]]] = {
    "list": (lambda: [1.0] * 1200, lambda held: held[1100], lambda held: held.__setitem__(1100, 3.0)),
    "huge list": (lambda: [1.0] * 300_000, lambda held: held[1100], lambda held: held.__setitem__(1100, 3.0)),
    "dictionary": (lambda: dict.fromkeys(range(1200), 1.0), lambda held: held[1100], lambda held: held.__setitem__(1100, 3.0)),
    "array": (lambda: np.ones(5000), lambda held: float(held[4000]), lambda held: held.__setitem__(4000, 3.0)),
    "namespace": (lambda: N(a=N(b=N(c=N(d=N(w=1.0))))), lambda held: held.a.b.c.d.w, lambda held: setattr(held.a.b.c.d, "w", 3.0)),
    "class": (_config, lambda held: held.w, lambda held: setattr(held, "w", 3.0)),
    "class within a class": (_config, lambda held: held.Inner.Most.w, lambda held: setattr(held.Inner.Most, "w", 3.0)),
    "class of an object": (lambda: _config()(), lambda held: held.Inner.w, lambda held: setattr(held.Inner, "w", 3.0)),
    "view": (lambda: types.MappingProxyType({"w": [1.0]}), lambda held: held["w"][0], lambda held: held["w"].__setitem__(0, 3.0)),
    "context": (lambda: contextvars.ContextVar("variable", default=1.0), lambda held: held.get(), lambda held: held.set(3.0)),
    "thread": (_local, lambda held: held.w, lambda held: setattr(held, "w", 3.0)),
    "reference": (_weak, lambda held: held().w, lambda held: setattr(held(), "w", 3.0)),
    "partials": (
        lambda: [functools.partial(_Holder.read, _Holder())],
        lambda held: held[0](),
        lambda held: setattr(held[0].args[0], "w", 3.0),
    ),
    "methods": (lambda: {"a": [_Holder().read]}, lambda held: held["a"][0](), lambda held: setattr(held["a"][0].__self__, "w", 3.0)),
    "functions": (
        lambda: ([_function()], {}),
        lambda held: held[0][0](),
        lambda held: setattr(held[0][0], "__defaults__", (3.0,)),
    ),
}


@pytest.mark.parametrize("case", _HELD)
def test_a_change_of_what_the_model_reads_is_noticed_or_was_announced(case: str) -> None:
    make, read, change = _HELD[case]

    def made() -> tuple[nn.Module, Callable[[], float], Callable[[], Any]]:
        model = _Scaled(make(), read)
        return model, lambda: 1.0, lambda: change(model.held)

    are_alike(made, announced=case.startswith("huge"))


def test_an_ordinary_loss_is_told_nothing_and_captured_once() -> None:
    """A vocabulary, answers that others have remembered meanwhile, attributes that no code of the program names, those of any function."""

    @functools.lru_cache
    def read(at: int) -> float:
        return float(at)

    words = {f"word{number}": number for number in range(5000)}

    def loss_scale() -> float:
        return read(1) * words["word2"] * float(getattr(read, "__eq__", None) is not None)

    model, change = nn.Linear(3, 2), lambda: (read(7), setattr(loss_scale, "calls", 7))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer, x = sgd(model), torch.ones(4, 3)
        planning, run = lowtide.Planning(progress=False, workspaces=False), lowtide.Run(check="never", arena="never")
        step = lowtide.optimize(
            model, (x,), loss=lambda model, x: model(x).mean() * loss_scale(), optimizer=optimizer, planning=planning, run=run
        )
        step(x)
        made = len(step._lookup.families[0].variants)
        for _ in range(3):
            change()
            step(x)
        assert len(step._lookup.families[0].variants) == made
