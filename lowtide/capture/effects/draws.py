"""What a program draws from Python's `random` and from NumPy's: drawn anew for each step, right before it begins, in the same order.

Numbers stand as terms, arrays as expressions that become tensors where the program computes with them. What it decides with them is asked
of each step's own, as of all numbers that are there before a step begins.
"""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from functools import partial
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import torch
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.base.places import ABSENT, Sum
from lowtide.capture.care.generators import bare, drawn_in_each_step, numpys_functions
from lowtide.capture.care.turns import all_replaced
from lowtide.capture.effects.stand_ins import LeavingError, without_stand_ins
from lowtide.capture.effects.sums import (
    EarlierNumber,
    EarlierNumbers,
    NumberExpression,
    Recipe,
    Term,
    earlier_of,
    numbers_in,
    recipe,
)
from lowtide.capture.sources import is_library, users_line
from lowtide.ir import tree

_OF_PYTHON = (
    "random", "uniform", "randint", "randrange", "getrandbits", "choice", "choices", "sample", "gauss", "normalvariate", "betavariate",
    "triangular", "expovariate", "gammavariate", "lognormvariate", "shuffle",
)  # fmt: skip
_OPERATIONS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "xor",
)  # fmt: skip
WRITES = "writes into an array that it draws, of which a view or a tensor may be in use: compute a new one (`x = x * 2`, `numpy.sort(x)`)"
_WITHOUT = {*sys.stdlib_module_names, "numpy", "torch", "sympy", "numba"}  # packages of which no function is the program's
_STATIC = ("shape", "dtype", "ndim", "size", "nbytes", "itemsize")


class HostDraws:
    """The calls that draw, and what they give for the step that comes next."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], Any]] = []
        self._drawn: list[Any] = []
        self._before: list[tuple[Callable[[Any], object], Any]] = []
        self._after: list[tuple[Callable[[Any], object], Any]] = []
        self._derived: dict[object, list[Any]] = {}

    def add(self, call: Callable[[], Any], value: Any) -> Sum:
        at = len(self._calls)
        self._calls.append(call)
        self._drawn.append(value)
        return Sum(lambda: self._drawn, at, ABSENT, (type(value),))

    def once(self, compute: Callable[[], Any]) -> Callable[[], list[Any]]:
        """What follows from draws and numbers, computed once for each step, however often it is asked for."""
        key = object()

        def now() -> list[Any]:
            if key not in self._derived:
                self._derived[key] = [compute()]
            return self._derived[key]

        return now

    def ahead(self) -> None:
        """Draw for the step that comes, and leave the generators as they are: it may be another program's step."""
        self._derived.clear()
        if not self._calls:
            return
        self._before = [(put, state()) for state, put in _GENERATORS]
        try:
            for at, call in enumerate(self._calls):
                self._drawn[at] = call()
            self._after = [(put, state()) for state, put in _GENERATORS]
        finally:
            self.go_back()

    def begin(self) -> None:
        for put, state in self._after:
            put(state)

    def go_back(self) -> None:
        """The generators are as they were before the step."""
        for put, state in self._before:
            put(state)


_GENERATORS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (random.getstate, random.setstate),
    (partial(numpy.random.get_state, legacy=False), numpy.random.set_state),
)


class HostArray(NumberExpression):
    """An array that follows from what is there before a step begins."""

    __slots__ = ("draws", "example", "is_shared")

    def __init__(self, draws: DrawRecorder, function: Callable[..., Any], args: tuple[Any, ...], example: Any) -> None:
        super().__init__(function, args, numpy.ndarray)
        self.draws, self.example, self.is_shared = draws, example, False

    def __getattr__(self, name: str) -> Any:
        if name in _STATIC or (name.startswith("__") and name != "__array__"):
            return getattr(self.example, name)
        if callable(getattr(self.example, name)):
            return lambda *args, **options: self.draws.computed(_method, (name, self, *args), options)
        return self.draws.computed(getattr, (self, name), {})

    def __len__(self) -> int:
        return len(self.example)

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(len(self.example)))

    def __getitem__(self, key: Any) -> Any:
        return self.draws.computed(operator.getitem, (self, key), {})

    def __setitem__(self, key: Any, item: Any) -> None:
        self.become(self.draws.computed(_with_item, (self, key, item), {}))

    def __copy__(self, *memo: Any) -> HostArray:
        copied: HostArray = self.copy()
        return copied

    __deepcopy__ = __copy__

    def become(self, other: HostArray) -> HostArray:
        """It is written in place. Raises LeavingError where another array, or a tensor, may lie in the same memory."""
        if self.is_shared:
            raise LeavingError(f"at {users_line()} it {WRITES}")
        self.function, self.args = other.function, other.args
        return self


def _with_item(array: Any, key: Any, item: Any) -> Any:
    copied = array.copy()
    copied[key] = item
    return copied


def _method(name: str, item: Any, *args: Any, **options: Any) -> Any:
    return getattr(item, name)(*args, **options)


def _same(item: Any) -> Any:
    return item


class DrawRecorder:
    def __init__(self, earlier: EarlierNumbers, refusals: list[Any]) -> None:
        self.draws, self._earlier, self._refusals = HostDraws(), earlier, refusals
        self.tensors: dict[int, Sum] = {}  # where arrays are found that stand as these tensors, by id
        self._held: list[torch.Tensor] = []

    def followed(self) -> AbstractContextManager[None]:
        """Draws of this thread are followed while this lasts."""
        draws = [*((random, name) for name in _OF_PYTHON), *((numpy.random, name) for name in numpys_functions())]
        draws += _imported({id(bare(getattr(owner, name))): name for owner, name in draws})
        drawing = ((owner, name, self._shuffling if name == "shuffle" else self._drawing) for owner, name in draws)
        return all_replaced((*drawing, (torch, "from_numpy", self._from_numpy)))

    def _drawing(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: self._draw(plain, args, options)

    def _shuffling(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def shuffled(items: Any) -> Any:
            copy = items.copy() if isinstance(items, numpy.ndarray) else list(items)
            plain(copy)
            return copy

        def shuffling(items: Any) -> None:
            items[:] = self._draw(shuffled, (items,), {})

        return shuffling

    def _draw(self, plain: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        again, before = self._recipe(plain, args, options), _Before(self._earlier.places)
        call = lambda: again(iter(()), before)  # noqa: E731
        with drawn_in_each_step():
            value = again(iter(()), self._earlier.numbers)
        return self._stands_for(value, self.draws.add(call, value))

    def computed(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What a function makes of such arrays and numbers: each step calls it again."""
        again, before = self._recipe(function, args, options), _Before(self._earlier.places)
        given: list[Any] = []
        value = self._recipe(partial(_reading, function, given), args, options)(iter(()), self._earlier.numbers)
        now = self.draws.once(lambda: again(iter(()), before))
        result = self._stands_for(value, Sum(now, 0, ABSENT, (type(value),)))
        if isinstance(value, numpy.ndarray) and any(numpy.may_share_memory(value, each) for each in given):
            for each in (result, *numbers_in((*args, *options.values()))):
                if isinstance(each, HostArray):
                    each.is_shared = True
        return result

    def _stands_for(self, value: Any, place: Sum) -> Any:
        number = EarlierNumber(self._earlier, value, place, self._refusals)
        if number.kind in (int, float):
            return number
        if isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind in "biuf":
            return HostArray(self, _same, (number,), value)
        if type(value) is list and value and all(type(each) in (int, float) for each in value):
            return [self._stands_for(each, Sum(lambda: place.now, at, ABSENT, (type(each),))) for at, each in enumerate(value)]
        return self._earlier.decides(number)

    def _recipe(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Recipe:
        """A call as a function of what is there before the step. Raises LeavingError for a number that only the step computes."""
        leaves, rebuild = tree.flatten(without_stand_ins((args, options)))
        for each in leaves:
            if isinstance(each.value, torch.Tensor):
                raise LeavingError(f"{function.__name__}() of NumPy's or Python's is given a tensor: draw a position, and index with it")
            if isinstance(each.value, Term) and earlier_of(each.value) is None:
                each.value.refuse(use=f"is given to {function.__name__}()")
        parts = [recipe(each.value) for each in leaves]

        def call(results: Iterator[Any], before: Sequence[Any]) -> Any:
            args, options = tree.unflatten(rebuild, [part(results, before) for part in parts])
            return function(*args, **options)

        return call

    def _from_numpy(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda item: self.tensor(item) if isinstance(item, HostArray) else plain(item)

    def tensor(self, array: HostArray) -> torch.Tensor:
        """The tensor that an array is to the program: an input of each step."""
        again, before, array.is_shared = recipe(array), _Before(self._earlier.places), True
        with _disable_current_modes():
            tensor = torch.from_numpy(numpy.array(array.example))
        now = lambda: [torch.from_numpy(numpy.array(again(iter(()), before)))]  # noqa: E731
        self.tensors[id(tensor)] = Sum(now, 0, ABSENT, (torch.Tensor,))
        self._held.append(tensor)
        return tensor

    def forget(self) -> None:
        self._held.clear()


class _Before(Sequence[Any]):
    """What lies in places when a step begins: looked at where it is asked for."""

    def __init__(self, places: Sequence[Sum]) -> None:
        self._places = tuple(places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, at: Any) -> Any:
        return self._places[at].now


def _reading(function: Callable[..., Any], given: list[Any], *args: Any, **options: Any) -> Any:
    """Call it with arrays that it cannot write, whatever lies in them. Raises LeavingError where it tries."""
    leaves, rebuild = tree.flatten((args, options))
    items = [each.value.view() if isinstance(each.value, numpy.ndarray) else each.value for each in leaves]
    for each in items:
        if isinstance(each, numpy.ndarray):
            each.flags.writeable = False
            given.append(each)
    args, options = tree.unflatten(rebuild, items)
    try:
        return function(*args, **options)
    except ValueError as error:
        if "read-only" not in str(error):
            raise
        raise LeavingError(f"{getattr(function, '__name__', 'a function')}() at {users_line()} {WRITES}") from None


def _imported(functions: Mapping[int, str]) -> list[tuple[Any, str]]:
    """The modules that have one of these functions, by `id`, under its own name (`from random import random`)."""
    names, modules = {*functions.values()}, dict[int, ModuleType]()  # a module may lie there under two names
    for name, module in tuple(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] not in _WITHOUT:
            modules[id(module)] = module
    having = ((module, name) for module in modules.values() for name in _names_in(module, names))
    return [(module, name) for module, name in having if name == functions.get(id(vars(module).get(name)))]


def _names_in(module: ModuleType, names: Set[str]) -> Set[str]:
    """Those of the names that a module has. Of thousands of modules a library's have no others once they are imported."""
    if (known := _of_libraries.get(module)) is None:
        known, file = names & vars(module).keys(), vars(module).get("__file__")
        if isinstance(file, str) and is_library(file) and not getattr(vars(module).get("__spec__"), "_initializing", False):
            _of_libraries[module] = known
    return known


_of_libraries = WeakKeyDictionary[ModuleType, Set[str]]()


def _operation(function: Callable[..., Any], turned: bool) -> Callable[..., Any]:
    def operation(self: HostArray, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return function(*(other, self.draws.tensor(self)) if turned else (self.draws.tensor(self), other))
        return self.draws.computed(function, (other, self) if turned else (self, other), {})

    return operation


for _name in _OPERATIONS:
    for _turned in (False, True):
        setattr(HostArray, f"__{'r' if _turned else ''}{_name.strip('_')}__", _operation(getattr(operator, _name), _turned))


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    written = lambda one, two: function(one.copy(), two)  # noqa: E731
    return lambda self, other: self.become(self.draws.computed(written, (self, other), {}))


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor"):
    setattr(HostArray, f"__{_name}__", _in_place(getattr(operator, _name)))
for _function in (operator.neg, operator.abs, operator.invert):
    setattr(HostArray, f"__{_function.__name__}__", lambda self, function=_function: self.draws.computed(function, (self,), {}))


def of_numpy(item: Any, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What a function of NumPy's makes of numbers and arrays that are there before the step."""
    draws = next((each.draws for each in (item, *args) if isinstance(each, HostArray)), None) or recorders[-1]
    return draws.computed(function, args, options)


recorders: list[DrawRecorder] = []  # of the captures under way
HostArray.__array_function__ = lambda self, function, types, args, options: of_numpy(self, function, args, options)  # type: ignore[attr-defined]
HostArray.__array_ufunc__ = Term.__array_ufunc__ = lambda self, function, method, *args, **options: of_numpy(  # type: ignore[attr-defined]
    self, getattr(function, method), args, options
)
Term.__array_function__ = HostArray.__array_function__  # type: ignore[attr-defined]
