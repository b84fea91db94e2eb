"""Variables of closures, and slots of objects, as tables of names, as objects keep attributes and modules their globals."""

from __future__ import annotations

import types
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from lowtide.base.places import ABSENT, Position
from lowtide.capture.care.names import codes, named


class Positions(MutableMapping[str, Any]):
    """The table of some names of a holder. One is not there while nothing is assigned."""

    def __init__(self, holder: Any, names: Sequence[str]) -> None:
        self._places = {name: Position.of(holder, name, "", "") for name in names}

    def __getitem__(self, name: str) -> Any:
        if name not in iter(self):
            raise KeyError(name)
        return self._places[name].now()

    def __setitem__(self, name: str, value: Any) -> None:
        self._places[name].put(value)

    def __delitem__(self, name: str) -> None:
        self._places[name].put(ABSENT)

    def __iter__(self) -> Iterator[str]:
        return (name for name, place in self._places.items() if place.now() is not ABSENT)

    def __len__(self) -> int:
        return sum(1 for _ in self)  # a list of them would ask for it


def is_read(name: str, code: types.CodeType) -> bool:
    """Whether code reads a variable of this name, or asks for all variables."""
    read = {word for each in codes(code) for word, _, _ in named(each)}
    return not read.isdisjoint({name, "globals", "vars", "eval", "exec"})
