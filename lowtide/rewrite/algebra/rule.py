"""What a rule is, and the places where it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from lowtide.ir.graph import Node, Storage
from lowtide.rewrite.algebra.uses import Uses


@dataclass(frozen=True, eq=False)
class Match:
    """Where a rule fits: what becomes of some nodes, and what is held between their uses before and after."""

    instead: Mapping[Node, tuple[Node, ...]]  # nodes that stay are among what becomes of them
    held: Storage  # what was held for nodes that are replaced
    now: Storage | None = None  # what is held in its place; None where something is that was held anyway
    beside: tuple[Storage, ...] = ()  # what was held for these nodes alone, too

    @property
    def removed(self) -> list[Node]:
        return [node for node, new in self.instead.items() if node not in new]

    @property
    def added(self) -> list[Node]:
        return [node for new in self.instead.values() for node in new if node not in self.instead]


Finder: TypeAlias = Callable[[Uses], Iterable[Match]]


@dataclass(frozen=True)
class Rule:
    """One row of the table."""

    name: str  # as plans tell it: "dropout's masks as bits"
    matches: Finder
    exact: bool = True  # the numbers are the same, to the last bit
