"""Which sets are split, and into how many parts: MAGIS's fission hierarchy tree and its mutations (sections 4.3 and 5.1).

A tree holds candidates, each below the smallest one that includes it, and a number of parts for each; 1 is a candidate that is not split.
Split sets lie apart or within one another, and never cross. A mutation gives another tree:

    enable   split a set that lies apart from all that is split
    nest     split a set within one that is split, or around it
    lift     split the set around a split one in its place
    disable  split a set no more that has no split one within
    divide   split a set into another number of parts

Where one set lies in another and both are cut along one dimension, parts of parts have to be whole units, too. The paper goes to the next
divisor of the dimension; here the last part may be smaller, and a number doubles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lowtide.errors import CheckError
from lowtide.fission.regions import Region


@dataclass(frozen=True, eq=False)
class FissionTree:
    """Candidates by number, the largest first."""

    regions: tuple[Region, ...]
    parents: tuple[int, ...]  # -1 for a root
    parts: tuple[int, ...]

    @classmethod
    def of(cls, regions: Sequence[Region]) -> FissionTree:
        """A tree of these sets, of which none is split."""
        ordered = sorted(regions, key=lambda region: (-len(region.axes), region.bits, region.component))
        parents = tuple(_parent(ordered, number) for number in range(len(ordered)))
        return cls(tuple(ordered), parents, (1,) * len(ordered))

    @property
    def split(self) -> tuple[int, ...]:
        """The candidates that are split, the largest first."""
        return tuple(number for number, parts in enumerate(self.parts) if parts > 1)

    def enable(self, number: int, parts: int = 2) -> FissionTree:
        """Raises CheckError unless nothing that is split touches the set, and it has so many units."""
        if any(self.regions[other].bits & self.regions[number].bits for other in self.split):
            self._refuse(number, "enabled", "nothing that is split to touch it")
        return self._with(number, parts)

    def nest(self, number: int, parts: int = 2) -> FissionTree:
        """Raises CheckError unless the set is not split, but one within or around it is."""
        if number in self.split or not any(_nested(self.regions[other], self.regions[number]) for other in self.split):
            self._refuse(number, "nested", "a set that is not split, within or around one that is")
        return self._with(number, parts)

    def lift(self, number: int) -> FissionTree:
        """Raises CheckError unless the set is split, lies in no split one, and has a parent."""
        if number not in self.split or self._around(number) or self.parents[number] < 0:
            self._refuse(number, "lifted", "a split set with a parent, within no other split one")
        return self._with(number, 1)._with(self.parents[number], self.parts[number])

    def disable(self, number: int) -> FissionTree:
        """Raises CheckError unless the set is split, and none within it is."""
        if number not in self.split or self._within(number):
            self._refuse(number, "disabled", "a split set, and no split one within it")
        return self._with(number, 1)

    def divide(self, number: int, parts: int) -> FissionTree:
        """Raises CheckError unless the set is split, and has so many units."""
        if number not in self.split:
            self._refuse(number, "divided", "a set that is split")
        return self._with(number, parts)

    def mutations(self) -> Iterator[tuple[str, int, FissionTree]]:
        """Every tree that is one mutation away: its name, the candidate and the tree. New splits are in two, numbers double."""
        for number, parts in enumerate(self.parts):
            for name, arguments in (("enable", (2,)), ("nest", (2,)), ("lift", ()), ("disable", ()), ("divide", (2 * parts,))):
                if (parts > 1) == (name in ("lift", "disable", "divide")):
                    try:
                        yield name, number, getattr(self, name)(number, *arguments)
                    except CheckError:
                        continue

    def check(self) -> None:
        """Raises CheckError unless all that is split lies apart or within one another, in whole units."""
        for number in self.split:
            region = self.regions[number]
            for other in self.split:
                both = region.bits & self.regions[other].bits
                if other != number and both and not _nested(region, self.regions[other]):
                    self._refuse(number, "split", "sets that lie apart or within one another")
            together = self.parts[number]
            for other in self._around(number):
                together *= self.parts[other] if self.regions[other].component == region.component else 1
            if not 1 < together <= region.units:
                self._refuse(number, f"split into {together}", f"2 to {region.units} parts")

    def _with(self, number: int, parts: int) -> FissionTree:
        changed = replace(self, parts=(*self.parts[:number], parts, *self.parts[number + 1 :]))
        changed.check()
        return changed

    def _around(self, number: int) -> list[int]:
        return [other for other in self.split if other < number and _includes(self.regions[other], self.regions[number])]

    def _within(self, number: int) -> list[int]:
        return [other for other in self.split if other > number and _includes(self.regions[number], self.regions[other])]

    def _refuse(self, number: int, what: str, expected: str) -> None:
        raise CheckError(f"the fission candidate {number} of {len(self.regions[number].axes)} nodes cannot be {what}: expected {expected}")


def _parent(regions: Sequence[Region], number: int) -> int:
    """The smallest one before that includes it."""
    return next((other for other in range(number - 1, -1, -1) if _includes(regions[other], regions[number])), -1)


def _includes(one: Region, two: Region) -> bool:
    return two.bits & ~one.bits == 0


def _nested(one: Region, two: Region) -> bool:
    return _includes(one, two) or _includes(two, one)
