"""Variables of closures as tables of names, as objects keep attributes and modules their globals."""

from __future__ import annotations

import types
from collections.abc import Iterator, MutableMapping
from typing import Any

from lowtide.base.places import ABSENT, Position


class Variable(MutableMapping[str, Any]):
    """The table of one name, which is not there while nothing is assigned."""

    def __init__(self, cell: types.CellType, name: str) -> None:
        self._cell, self._name = cell, name

    def __getitem__(self, name: str) -> Any:
        if name not in iter(self):
            raise KeyError(name)
        return self._cell.cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self._cell.cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cell.cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter(() if Position.of(self._cell, "", "", "").now() is ABSENT else (self._name,))

    def __len__(self) -> int:
        return sum(1 for _ in self)  # a list of them would ask for it
