"""How a thing looks: equal tokens for things that a program cannot tell apart, also after they were changed in place."""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import torch

Token: TypeAlias = Any  # hashable; equal to itself and to tokens of what looks alike

_PLAIN = frozenset({bool, int, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size})
_CONTAINERS: tuple[Any, ...] = (list, tuple, deque, set, frozenset, dict)
_OPAQUE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, property, classmethod, staticmethod, torch.Tensor)
_NAMED = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_DEEPEST = 4  # objects within objects, lists within lists
_LARGEST = 1000  # items of a container that is compared item by item; a larger one by identity and length
_MOST = 10_000  # items within one attribute


class Identity:
    """The one object that it is of; it does not keep that alive."""

    __slots__ = ("_hash", "_ref", "text")

    def __init__(self, item: Any) -> None:
        self._hash, self.text = id(item), f"{type(item).__qualname__} {item.__qualname__ if isinstance(item, _NAMED) else ''}".strip()
        try:
            self._ref: Any = weakref.ref(item)
        except TypeError:
            self._ref = lambda: item

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self._hash == other._hash and (mine := self._ref()) is not None and mine is other._ref()

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"a {self.text}"


class TokenWatchers(Protocol):
    """Who is told what tokens rest on."""

    def container(self, item: Any) -> None:
        """They rest on what this holds."""


class Tokens:
    """Makes tokens, and tells `watch` what they rest on. `known` are the tokens of things that have their own, by id."""

    def __init__(self, watch: TokenWatchers, known: Mapping[int, Token]) -> None:
        self._watch, self._known = watch, known
        self._made: dict[tuple[int, int], Token] = {}
        self._left = _MOST

    def of(self, item: Any) -> Token:
        self._left = _MOST
        return self._of(item, 0)

    def _of(self, item: Any, depth: int) -> Token:
        kind = type(item)
        if kind in _PLAIN:
            return kind, item
        if kind in (float, complex):
            return kind, repr(item)  # nan looks like itself, -0.0 unlike 0.0
        if id(item) in self._known:
            return self._known[id(item)]
        key = id(item), depth
        if key not in self._made:
            self._made[key] = Identity(item)  # of what holds itself
            self._made[key] = self._opened(item, kind, depth)
        return self._made[key]

    def _opened(self, item: Any, kind: type, depth: int) -> Token:
        """The token of what may hold other things."""
        if isinstance(item, types.MethodType):
            return kind, Identity(item.__func__), self._of(item.__self__, _DEEPEST)
        if isinstance(item, functools.partial):
            self._watch.container(item.keywords)
            return kind, self._of(item.func, _DEEPEST), self._pieces(item.args, depth), self._entries(item.keywords, depth)
        if isinstance(item, _CONTAINERS):
            return self._container(item, kind, depth)
        return self._object(item, depth)

    def _container(self, item: Any, kind: type, depth: int) -> Token:
        length = next(base for base in _CONTAINERS if isinstance(item, base)).__len__(item)  # its class may have another
        if depth >= _DEEPEST or length > min(_LARGEST, self._left):
            return kind, length, Identity(item)
        self._left -= length
        if not isinstance(item, (tuple, frozenset)):
            self._watch.container(item)
        if isinstance(item, dict):
            return kind, self._entries(item, depth)
        if isinstance(item, (set, frozenset)):
            return kind, frozenset(self._of(piece, _DEEPEST) for piece in item)
        return kind, self._pieces(item, depth)

    def _object(self, item: Any, depth: int) -> Token:
        """An object is itself, with its attributes as they are."""
        try:
            attributes = object.__getattribute__(item, "__dict__")
        except AttributeError:
            return Identity(item)
        if depth >= _DEEPEST or isinstance(item, _OPAQUE) or type(attributes) is not dict or len(attributes) > min(_LARGEST, self._left):
            return Identity(item)
        self._left -= len(attributes)
        self._watch.container(attributes)
        return Identity(item), self._entries(attributes, depth)

    def _pieces(self, items: Any, depth: int) -> Token:
        return tuple([self._of(piece, depth + 1) for piece in items])

    def _entries(self, items: Mapping[Any, Any], depth: int) -> Token:
        return tuple([(self._of(key, _DEEPEST), self._of(piece, depth + 1)) for key, piece in items.items()])
