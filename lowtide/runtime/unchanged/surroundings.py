"""Whether what a program has read beside its model is as it was: by identity in each call, by value where something lies elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, contains, getitem, is_, methodcaller
from types import CellType
from typing import Any

import numpy as np

from lowtide.base import places
from lowtide.base.places import Position
from lowtide.runtime.unchanged.tokens import Identity, Token, Tokens

_values, _content = methodcaller("values"), attrgetter("cell_contents")
_MOST_BYTES = 4096  # of an array that is compared number by number


class BesideWatch:
    """The places that a program has read, as they were when this was made."""

    def __init__(self, found: places.Beside) -> None:
        self._found = found
        self._tokens = self._looked()
        self._sealed: _Sealed | None = _Sealed(found.places, self._containers)

    def holds(self) -> bool:
        """Whether a program that has read them then reads the same now."""
        if self.unmoved():
            return True
        if self._looked() != self._tokens:
            self._sealed = None  # it would keep what is gone alive
            return False
        self._sealed = _Sealed(self._found.places, self._containers)
        return True

    def unmoved(self) -> bool:
        """Whether the same objects lie there; False may also be said of what only looks alike."""
        return self._sealed is not None and self._sealed.same()

    def changes(self) -> list[tuple[Position, Token, Token]]:
        """The places that look otherwise now, with how they looked, and how they look."""
        triples = zip(self._found.places, self._tokens, self._looked(), strict=True)
        return [(place, old, new) for place, old, new in triples if old != new]

    def _looked(self) -> list[Token]:
        known = {id(item): Identity(item) for each in self._found.followed if (item := each()) is not None}
        self._containers = _Containers()
        tokens = Tokens(self._containers, known)
        return [_token(place, tokens) for place in self._found.places]


class _Containers:
    """What tokens rest on."""

    def __init__(self) -> None:
        self.items: dict[int, Any] = {}

    def container(self, item: Any) -> None:
        self.items[id(item)] = item


class _Sealed:
    """The objects that lie in places, and in containers there."""

    def __init__(self, found: tuple[Position, ...], containers: _Containers) -> None:
        pairs = [(place, list(place.tables())) for place in found]
        there = [(table, place.name) for place, tables in pairs for table, has in tables if has]
        absent = [(table, place.name) for place, tables in pairs for table, has in tables if not has]
        self._tables, self._names = [table for table, _ in there], [name for _, name in there]
        self._without, self._missing = [table for table, _ in absent], [name for _, name in absent]
        self._held = [*map(getitem, self._tables, self._names)]
        self._cells = [place.holder for place in found if isinstance(place.holder, CellType) and place.now() is not places.ABSENT]
        self._variables = [*map(_content, self._cells)]
        known = {id(cell) for cell in self._cells}
        self._other = [place for place, tables in pairs if id(place.holder) not in known and _is_kept_elsewhere(place, tables)]
        self._others = [place.now() for place in self._other]
        self._containers = [*containers.items.values()]
        self._lengths, self._items = [*map(len, self._containers)], [*chain.from_iterable(self._containers)]
        self._mappings = [each for each in self._containers if isinstance(each, Mapping)]
        self._values = [*chain.from_iterable(map(_values, self._mappings))]
        self._arrays = [(item, item.tobytes()) for item in map(Position.now, found) if _is_small_array(item)]

    def same(self) -> bool:
        """Whether all lies where it lay."""
        try:
            return (
                all(map(is_, map(getitem, self._tables, self._names), self._held))
                and not any(map(contains, self._without, self._missing))
                and all(map(is_, map(_content, self._cells), self._variables))
                and all(place.now() is item for place, item in zip(self._other, self._others, strict=True))
                and [*map(len, self._containers)] == self._lengths
                and all(map(is_, chain.from_iterable(self._containers), self._items))
                and all(map(is_, chain.from_iterable(map(_values, self._mappings)), self._values))
                and all(item.tobytes() == numbers for item, numbers in self._arrays)
            )
        except (KeyError, ValueError):  # a name is gone, or a variable
            return False


def _is_kept_elsewhere(place: Position, tables: Sequence[tuple[Mapping[str, Any], bool]]) -> bool:
    """Whether no table holds what lies there: a name in it may stand for what an object keeps by itself, as `__slots__` do."""
    held = next((table[place.name] for table, has in tables if has), places.ABSENT)
    return not tables or held is not place.now()


def _token(place: Position, tokens: Tokens) -> Token:
    item = place.now()
    if place.holder is None:
        return places.ABSENT
    if _is_small_array(item):
        return np.ndarray, str(item.dtype), item.shape, item.tobytes()
    return tokens.of(item)


def _is_small_array(item: Any) -> bool:
    return type(item) is np.ndarray and item.nbytes <= _MOST_BYTES and item.dtype != object
