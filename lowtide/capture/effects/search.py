"""Where containers lie that functions, objects and modules lead to: stand-ins are put there, in the places themselves."""

from __future__ import annotations

import collections
import functools
import threading
import types
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.base.places import ABSENT, Position, slots_of, static_attribute
from lowtide.capture.care import surroundings
from lowtide.capture.care.turns import lying_in, seen, undoing
from lowtide.capture.effects.code import Positions, rewrite
from lowtide.capture.effects.stand_ins import KINDS
from lowtide.capture.sources import is_users

LARGEST = 1000  # items of a container among which others are looked for
_MOST = 20_000  # objects that are looked at


@dataclass(frozen=True)
class PlaceSearch:
    is_chosen: Callable[[Any], bool]  # whether there is a stand-in for a container
    stand_in: Callable[[Any, Callable[[], Any], collections.deque[Any]], Any]  # for one that is found again in this way
    follow: Callable[[Any, MutableMapping[str, Any]], None]  # a table of attributes, globals or a variable, and whose it is
    is_followed: Callable[[Any, str], bool]  # whether what stands for a number lies there already
    meet: Callable[[types.FunctionType, set[str]], None]  # a function of the user's that names these
    undo: Callable[[Callable[[], object]], None]
    show: Callable[[nn.Module, dict[str, Any]], None]  # a module: what is put there is there for this thread alone

    def walk(self, waiting: collections.deque[Any]) -> None:
        met: set[int] = set()
        tabled: set[int] = set()
        undo, is_chosen = self.undo, self.is_chosen

        def table_of(item: Any, table: MutableMapping[str, Any]) -> None:
            if id(item) not in tabled:
                tabled.add(id(item))
                self.follow(item, table)

        def place(now: Callable[[], Any], put: Callable[[Any], object]) -> None:
            item = now()
            if is_chosen(item):
                undo(functools.partial(put, item))
                put(self.stand_in(item, now, waiting))
            elif isinstance(item, types.BuiltinMethodType) and is_chosen(item.__self__):  # `put = kept.append`
                undo(functools.partial(put, item))
                put(getattr(self.stand_in(item.__self__, lambda: now().__self__, waiting), item.__name__))
            elif type(item) is tuple and any(map(is_chosen, item)):
                undo(functools.partial(put, item))
                pieces = [(each, functools.partial(lambda at: now()[at], at)) for at, each in enumerate(item)]
                put(tuple(self.stand_in(each, getter, waiting) if is_chosen(each) else each for each, getter in pieces))
                waiting.append(item)
            else:
                waiting.append(item)

        while waiting and len(met) < _MOST:
            item = waiting.popleft()
            if id(item) in met or isinstance(item, (torch.Tensor, types.ModuleType, str, int, float)):
                continue
            met.add(id(item))
            if type(item) in KINDS and len(item) < LARGEST:
                waiting.extend(item.values() if isinstance(item, dict) else item)
            elif (called := surroundings.called_by(item)) is not None:
                waiting.extend(called)
                for name in (keywords := item.keywords) if isinstance(item, functools.partial) else ():
                    place(functools.partial(keywords.__getitem__, name), functools.partial(keywords.__setitem__, name))
            elif isinstance(item, types.FunctionType):
                if vars(item) and is_users(item):
                    table_of(item, vars(item))
                self.meet(item, _of_function(item, place, table_of))
            elif isinstance(item, type):
                waiting.extend(surroundings.functions_of(item))
                table_of(item, Positions(item, surroundings.numbers_of_class(item)))
                for name in surroundings.containers_of_class(item):
                    place(functools.partial(vars(item).__getitem__, name), functools.partial(type.__setattr__, item, name))
            elif isinstance(item, nn.Module) or surroundings.is_of_users(item):
                if isinstance(item, nn.Module):
                    self.show(item, vars(item))
                self._of_object(item, place, waiting)

    def _of_object(self, item: Any, place: Callable[..., None], waiting: collections.deque[Any]) -> None:
        if slots := slots_of(item):
            self.follow(item, table_of_slots := Positions(item, slots))
            for name in slots:
                if not self.is_followed(item, name):
                    place(functools.partial(static_attribute, item, name), functools.partial(table_of_slots.__setitem__, name))
        waiting.extend(type(item).__mro__)
        table = lying_in(item) if isinstance(item, nn.Module) else getattr(item, "__dict__", None)
        if not isinstance(table, dict) or isinstance(item, (type, threading.local)):  # each thread has another of the latter
            return
        self.follow(item, table)
        if isinstance(item, nn.Module):
            self.follow(item, table["_buffers"])
        for name, value in list(table.items()):
            if self.is_followed(item, name):
                continue
            if isinstance(item, nn.Module) and name in surroundings.OWN_OF_MODULES:
                waiting.extend(value.values() if isinstance(value, dict) else ())
            else:
                place(functools.partial(table.__getitem__, name), functools.partial(seen(item, table).__setitem__, name))


@contextmanager
def conversions_followed(roots: Iterable[Any]) -> Iterator[None]:
    """`float()`, `int()` and `len()` of sizes, and texts with them, are followed in the user's functions while this lasts."""
    with undoing() as undo:

        def meet(function: types.FunctionType, _: set[str]) -> None:
            if is_users(function):
                rewrite(function, undo)

        search = PlaceSearch(lambda _: False, lambda item, *_: item, lambda *_: None, lambda *_: False, meet, undo, lambda *_: None)
        search.walk(collections.deque(roots))
        yield


def _of_function(function: types.FunctionType, place: Callable[..., None], table_of: Callable[..., None]) -> set[str]:
    """A function's own variables, its defaults, the globals that it names; those names, if it is a user's."""
    for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True) if is_users(function) else ():
        table_of(cell, Positions(cell, [name]))
    for cell in function.__closure__ or ():
        if Position.of(cell).now() is not ABSENT:
            place(functools.partial(getattr, cell, "cell_contents"), functools.partial(setattr, cell, "cell_contents"))
    if not is_users(function):
        return set()
    for at in range(len(function.__defaults__ or ())):
        place(functools.partial(lambda at: (function.__defaults__ or ())[at], at), functools.partial(_put_default, function, at))
    defaults = function.__kwdefaults__ or {}
    for name in defaults:
        place(functools.partial(defaults.__getitem__, name), functools.partial(defaults.__setitem__, name))
    named, own = surroundings.names_in(function.__code__), function.__globals__
    for table in (own, *(vars(item) for name in named if surroundings.is_users_module(item := own.get(name)))):
        table_of(table, table)
        for name in named.intersection(table):
            place(functools.partial(table.__getitem__, name), functools.partial(table.__setitem__, name))
    return named


def _put_default(function: types.FunctionType, at: int, item: Any) -> None:
    defaults = function.__defaults__ or ()
    function.__defaults__ = (*defaults[:at], item, *defaults[at + 1 :])
