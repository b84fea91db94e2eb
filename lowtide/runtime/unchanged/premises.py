"""What a captured program takes for granted, and whether it still holds."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.base import places
from lowtide.runtime.caller import Caller
from lowtide.runtime.unchanged.caller_state import CallerState, Location, Reads
from lowtide.runtime.unchanged.surroundings import BesideWatch
from lowtide.runtime.unchanged.tokens import Identity, Token
from lowtide.runtime.unchanged.watch import Watch


class Premises:
    """How a caller's objects, and what lies `beside`, looked when they were captured, as far as the program reads them.

    Asking again compares identities, in microseconds; only where something was put elsewhere does it look anew, and compares values.
    """

    def __init__(self, caller: Caller, reads: Reads, beside: places.Beside = places.NOTHING) -> None:
        self._caller, self._reads, self.beside = caller, reads, BesideWatch(beside)
        look = CallerState(caller, reads)
        self._locations = look.locations
        self._watch: Watch | None = look.watched()
        self.unwatched = [*look.unwatched, *self.beside.unwatched]  # places that hold too much

    def holds(self) -> bool:
        """Whether a program that was captured then is right now."""
        if not self.beside.holds():
            return False
        if self._watch is not None and self._watch.same():
            return True
        look = CallerState(self._caller, self._reads)
        if look.locations != self._locations:
            self._watch = None  # it would keep what is gone alive
            return False
        self._watch = look.watched()
        return True

    def unmoved(self) -> bool:
        """Whether nothing was put elsewhere since it was last asked; False may also be said of what only looks alike."""
        return self._watch is not None and self.beside.unmoved() and self._watch.same()

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
