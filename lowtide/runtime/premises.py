"""What a captured program takes for granted, and whether it still holds: the caller's own, what lies beside it, hyper-parameters.

What a program has read beside its model is as it was by identity in each call, by value where something lies elsewhere. Hyper-parameters
have to be of the same sort: numbers, or tensors that look alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import contains, getitem, is_
from types import CellType, FunctionType
from typing import Any

import torch

from lowtide.base import places
from lowtide.base.places import Position
from lowtide.ir.graph import Graph, Kind, Slot
from lowtide.runtime.caller import Caller, layout_of, looks_like
from lowtide.runtime.caller_state import CallerState, Location, Reads
from lowtide.runtime.tokens import ContentWatch, Identity, Token, Tokens, Watch


@dataclass(frozen=True)
class SettingsCheck:
    """What each hyper-parameter that the program reads must be."""

    numbers: tuple[Slot, ...]
    tensors: tuple[tuple[Slot, tuple[Any, ...]], ...]  # shape, strides, dtype, device

    @classmethod
    def of(cls, graph: Graph, slots: Sequence[Slot]) -> SettingsCheck:
        """The check for the inputs of a graph, which `slots` hold."""
        pairs = [(slot, value) for value, slot in zip(graph.inputs, slots, strict=True) if slot.table == "group"]
        numbers = tuple(slot for slot, value in pairs if value.storage.kind is Kind.SCALAR)
        return cls(numbers, tuple((slot, layout_of(value)) for slot, value in pairs if value.storage.kind is not Kind.SCALAR))

    def hold(self, read: Callable[[Slot], Any]) -> bool:
        """Whether what `read` finds in the slots now is of the same sort."""
        if not all(isinstance(read(slot), (int, float)) for slot in self.numbers):
            return False
        for slot, layout in self.tensors:
            item = read(slot)
            if not isinstance(item, torch.Tensor) or not looks_like(item, layout):
                return False
        return True


class BesideWatch:
    """The places that a program has read, as they were when this was made."""

    def __init__(self, beside: places.Beside) -> None:
        self._found = beside
        self._tokens = self._looked()
        self._sealed: _Sealed | None = _Sealed(beside.places, self._contents)

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

    def __init__(self, positions: tuple[Position, ...], contents: ContentWatch) -> None:
        direct = [place for place in positions if _is_direct(place.holder)]
        self._holders = [place.holder for place in direct]
        self._attributes = ["cell_contents" if isinstance(place.holder, CellType) else place.name for place in direct]
        self._items = [place.now() for place in direct]
        pairs = [(place, list(place.tables())) for place in positions if not _is_direct(place.holder)]
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
    item = next((table[place.name] for table, has in tables if has), places.ABSENT)
    return not tables or item is not place.now()


class Premises:
    """How a caller's objects, and what lies `beside`, looked when they were captured, as far as the program reads them.

    Asking again compares identities, in microseconds; only where something was put elsewhere does it look anew, and compares values.
    """

    def __init__(self, caller: Caller, reads: Reads, beside: places.Beside = places.NOTHING) -> None:
        self._caller, self._reads, self.beside = caller, reads, BesideWatch(beside)
        state = CallerState(caller, reads)
        self._locations = state.locations
        self._watch: Watch | None = state.watched()
        self.unwatched = [*state.unwatched, *self.beside.unwatched]  # places that hold too much

    def holds(self) -> bool:
        """Whether a program that was captured then is right now."""
        if not self.beside.holds():
            return False
        if self._watch is not None and self._watch.same():
            return True
        state = CallerState(self._caller, self._reads)
        if state.locations != self._locations:
            self._watch = None  # it would keep what is gone alive
            return False
        self._watch = state.watched()
        return True

    def unmoved(self) -> bool:
        """Whether nothing was put elsewhere since it was last asked; False may also be said of what only looks alike."""
        return self._watch is not None and self.beside.unmoved() and self._watch.same()

    def other_numbers(self) -> list[Position]:
        """The places in which another number lies now."""
        now = CallerState(self._caller, self._reads).locations
        own = [(at, old, now.get(at, _ABSENT)) for at, old in self._locations.items() if at.what == "attribute"]
        modules = dict(self._caller.model.named_modules())
        places = [
            (Position.of(modules[at.path], at.name, str(at), ""), old, new) for at, old, new in own if old != new and at.path in modules
        ]
        return [place for place, old, new in (*self.beside.changes(), *places) if {_kind(old), _kind(new)} <= {int, float}]

    def change(self) -> str:
        """What does not hold any more, in words; empty where all does."""
        for place, old, new in self.beside.changes():
            return f"{place} {_changed(old, new)}"
        return first_difference(self._locations, CallerState(self._caller, self._reads).locations)


def first_difference(before: Mapping[Location, Token], now: Mapping[Location, Token]) -> str:
    """The first place that looks otherwise, in words: "attribute 'p' of 'layer1.drop' was 0.1 and is 0.2"; empty where there is none."""
    for location in (*before, *now):
        old, new = before.get(location, _ABSENT), now.get(location, _ABSENT)
        if old != new:
            return f"{location} {_changed(old, new)}"
    return ""


def _changed(old: Token, new: Token) -> str:
    shown = (_shown(old), _shown(new))
    return f"was {shown[0]} and is {shown[1]}" if shown[0] != shown[1] else f"has changed{_where(old, new)}"


_ABSENT = places.ABSENT


def _kind(token: Token) -> Any:
    return token[0] if isinstance(token, tuple) and token else None


def _where(old: Token, new: Token) -> str:
    """What within two things differs, by the name under which it lies: ": 'p' was 0.1 and is 0.2"; empty where no name leads there."""
    name = ""
    while (names := _by_name(old)) and (others := _by_name(new)):
        name = next((each for each in {**names, **others} if names.get(each, _ABSENT) != others.get(each, _ABSENT)), "")
        if not name:
            return ""
        old, new = names.get(name, _ABSENT), others.get(name, _ABSENT)
    shown = (_shown(old), _shown(new))
    return f": {name!r} was {shown[0]} and is {shown[1]}" if name and shown[0] != shown[1] else ""


def _by_name(token: Token) -> dict[str, Token]:
    """The tokens of what an object or a dictionary holds under a text; empty for others."""
    entries = token[1] if isinstance(token, tuple) and len(token) == 2 and isinstance(token[1], tuple) else ()
    pairs = [each for each in entries if isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], tuple)]
    return {key[1]: value for key, value in pairs if len(key) == 2 and key[0] is str}


def _shown(token: Token) -> str:
    if token is _ABSENT:
        return token
    if isinstance(token, tuple) and len(token) == 2 and isinstance(token[0], type):
        kind, value = token
        return value if kind in (float, complex) else repr(value) if kind in (bool, int, str, type(None)) else f"a {kind.__name__}"
    return repr(token) if isinstance(token, Identity) else token.__qualname__ if isinstance(token, type) else "something else"
