"""Variables of closures as tables of names, as objects keep attributes and modules their globals."""

from __future__ import annotations

import types
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Variable(MutableMapping[str, Any]):
    """The table of one name, which is not there while nothing is assigned."""

    cell: types.CellType
    name: str

    def __getitem__(self, name: str) -> Any:
        try:
            return {self.name: self.cell.cell_contents}[name]
        except ValueError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self.cell.cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self.cell.cell_contents

    def __iter__(self) -> Iterator[str]:
        try:
            self.cell.cell_contents  # noqa: B018  # raises where nothing is assigned
        except ValueError:
            return iter(())
        return iter((self.name,))

    def __len__(self) -> int:
        return sum(1 for _ in self)
