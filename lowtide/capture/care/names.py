"""The names that the code of a function reads: variables, globals, modules, and what is asked of each in a row.

And variables of closures, and slots of objects, as tables of names, as objects keep attributes and modules their globals.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from lowtide.base.places import ABSENT, Position

_NAMES, _ATTRIBUTES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "IMPORT_NAME"), ("LOAD_ATTR", "LOAD_METHOD")
IMPORT = "import "


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code, and that of the functions within it."""
    yield code
    for piece in code.co_consts:
        if isinstance(piece, types.CodeType):
            yield from codes(piece)


def named(code: types.CodeType) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """The globals, free variables and ("import x") modules that code names, each with attributes read of it in a row, and the line."""
    name, chain, line, at = "", [], code.co_firstlineno, code.co_firstlineno
    for each in dis.get_instructions(code):
        at = each.starts_line or at if not isinstance(each.starts_line, bool) else getattr(each, "line_number", at) or at
        if name and each.opname in _ATTRIBUTES:
            chain.append(each.argval)
            continue
        if name:
            yield name, tuple(chain), line
            name, chain = "", []
        if each.opname in _NAMES:
            name, line = f"{IMPORT if each.opname == 'IMPORT_NAME' else ''}{each.argval}", at
    if name:
        yield name, tuple(chain), line


class Positions(MutableMapping[str, Any]):
    """The table of some names of a holder. One is not there while nothing is assigned."""

    def __init__(self, holder: Any, names: Sequence[str]) -> None:
        self._places = {name: Position.of(holder, name) for name in names}

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
