"""Numbers and texts that a program reads, replaces, and then leaves alone: flags that a first call sets, sizes that it notes.

And hooks that it puts on modules in a first call, which it notes in such a flag.

The program after that is what most steps run. Where the first one computes the same, the first step runs it, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import getattr_static
from typing import Any

from lowtide.base.places import ABSENT, Position
from lowtide.capture.care.contents import PLAIN, differ
from lowtide.capture.data.facts import Reading


@dataclass(frozen=True, eq=False)
class Memo:
    place: Position
    before: Any
    now: Any
    refusal: str  # what is said where the next step puts something else there

    @property
    def is_pending(self) -> bool:
        """Whether a step has still to put it there."""
        return not _same(self.place.now(), self.now)

    @property
    def may_be_sum(self) -> bool:
        kinds = {type(self.before), type(self.now)}
        return kinds <= {int, float} or (kinds == {str} and self.now.startswith(self.before))

    def put_back(self) -> None:
        """What the program has found: an object's own, or that of its class."""
        holder = self.place.holder
        of_class = ABSENT if isinstance(holder, type) else getattr_static(type(holder), self.place.name, ABSENT)
        self.place.put(ABSENT if of_class is self.before else self.before)

    def holds(self) -> bool:
        """Whether there is what the program has found, or what it leaves."""
        return not self.is_pending or _same(self.place.now(), self.before)

    def __str__(self) -> str:
        return f"{self.place} was {self.before!r} and is {self.now!r}"


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, PLAIN) and isinstance(other, PLAIN) and not differ(one, other))


@dataclass(frozen=True)
class FlagRecorder:
    """What the first step does beside the others."""

    memos: tuple[Memo, ...] = ()
    readings: tuple[Reading, ...] = ()  # what must come out of the caller's data in it, for the others to compute the same
    closer: str = ""  # why no step can follow the numbers among them

    @property
    def is_pending(self) -> bool:
        return any(memo.is_pending for memo in self.memos)

    @property
    def to_read(self) -> tuple[Reading, ...]:
        """What has to hold in the step that comes next."""
        return self.readings if self.is_pending else ()

    def holds(self) -> bool:
        return all(memo.holds() for memo in self.memos)

    def put(self) -> None:
        for memo in self.memos:
            if memo.is_pending:
                memo.place.put(memo.now)

    def put_back(self) -> None:
        for memo in self.memos:
            memo.put_back()
