"""Whether what a program has read beside its model is as it was: by identity in each call, by value where something lies elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import contains, getitem, is_
from types import CellType, FunctionType
from typing import Any

from lowtide.base import places
from lowtide.base.places import Position
from lowtide.runtime.unchanged.tokens import Identity, Token, Tokens
from lowtide.runtime.unchanged.watch import ContentWatch


class BesideWatch:
    """The places that a program has read, as they were when this was made."""

    def __init__(self, found: places.Beside) -> None:
        self._found = found
        self._tokens = self._looked()
        self._sealed: _Sealed | None = _Sealed(found.places, self._contents)

    def holds(self) -> bool:
        """Whether a program that has read them then reads the same now."""
        if self.unmoved():
            return True
        if self._looked() != self._tokens:
            self._sealed = None  # it would keep what is gone alive
            return False
        self._sealed = _Sealed(self._found.places, self._contents)
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
        self._contents = ContentWatch()
        tokens = Tokens(self._contents, known)
        self.unwatched = tokens.unwatched
        return [places.ABSENT if place.holder is None else tokens.of(place.now(), place) for place in self._found.places]


class _Sealed:
    """The objects that lie in places, and in containers there."""

    def __init__(self, found: tuple[Position, ...], contents: ContentWatch) -> None:
        direct = [place for place in found if _is_direct(place.holder)]
        self._holders = [place.holder for place in direct]
        self._attributes = ["cell_contents" if isinstance(place.holder, CellType) else place.name for place in direct]
        self._items = [place.now() for place in direct]
        pairs = [(place, list(place.tables())) for place in found if not _is_direct(place.holder)]
        there = [(table, place.name) for place, tables in pairs for table, has in tables if has]
        absent = [(table, place.name) for place, tables in pairs for table, has in tables if not has]
        self._tables, self._names = [table for table, _ in there], [name for _, name in there]
        self._without, self._missing = [table for table, _ in absent], [name for _, name in absent]
        self._held = [*map(getitem, self._tables, self._names)]
        self._other = [place for place, tables in pairs if _is_kept_elsewhere(place, tables)]
        self._others = [place.now() for place in self._other]
        self._contents = contents
        contents.seal()

    def same(self) -> bool:
        """Whether all lies where it lay."""
        try:
            return (
                all(map(is_, map(getitem, self._tables, self._names), self._held))
                and not any(map(contains, self._without, self._missing))
                and all(map(is_, map(getattr, self._holders, self._attributes, repeat(places.ABSENT)), self._items))
                and all(place.now() is item for place, item in zip(self._other, self._others, strict=True))
                and self._contents.same()
            )
        except (KeyError, ValueError):  # a name is gone, or a variable
            return False


def _is_direct(holder: Any) -> bool:
    """Whether what lies there is an attribute of the holder's in Python itself: of a function, or of a variable that has a value."""
    return isinstance(holder, FunctionType) or (isinstance(holder, CellType) and holder != CellType())


def _is_kept_elsewhere(place: Position, tables: Sequence[tuple[Mapping[str, Any], bool]]) -> bool:
    """Whether no table holds what lies there: a name in it may stand for what an object keeps by itself, as `__slots__` do."""
    held = next((table[place.name] for table, has in tables if has), places.ABSENT)
    return not tables or held is not place.now()
