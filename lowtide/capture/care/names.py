"""The names that the code of a function reads: variables, globals, modules, and what is asked of each in a row."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator

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
