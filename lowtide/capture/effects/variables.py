"""Variables of closures, and slots of objects, as tables of names, as objects keep attributes and modules their globals."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from lowtide.base.places import ABSENT, Position

_READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF", "LOAD_FROM_DICT_OR_GLOBALS")


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
    if {"globals", "vars", "eval", "exec"}.intersection(code.co_names):
        return True
    here = name in (*code.co_names, *code.co_freevars, *code.co_cellvars)
    reads = here and any(each.argval == name and each.opname in _READS for each in dis.get_instructions(code))
    return reads or any(is_read(name, each) for each in code.co_consts if isinstance(each, types.CodeType))
