"""Which sets are split, and into how many parts: MAGIS's fission hierarchy tree (section 4.3), as far as sets that lie apart need it.

A tree holds candidates, the largest first, and a number of parts for each; 1 is a candidate that is not split. Of the paper's mutations
(section 5.1) there is one: a set is split only where nothing that is split touches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from lowtide.errors import CheckError
from lowtide.fission.regions import SplitRegion


@dataclass(frozen=True, eq=False)
class FissionTree:
    """Candidates by number, the largest first."""

    regions: tuple[SplitRegion, ...]
    parts: tuple[int, ...]

    @classmethod
    def of(cls, regions: Sequence[SplitRegion]) -> FissionTree:
        ordered = sorted(regions, key=lambda region: (-len(region.axes), region.bits, region.component))
        return cls(tuple(ordered), (1,) * len(ordered))

    @property
    def split(self) -> tuple[int, ...]:
        return tuple(number for number, parts in enumerate(self.parts) if parts > 1)

    def enable(self, number: int, parts: int = 2) -> FissionTree:
        """With one more set split. Raises CheckError unless nothing that is split touches it, and it has so many units."""
        region = self.regions[number]
        if any(self.regions[other].bits & region.bits for other in self.split):
            self._refuse(number, "enabled", "nothing that is split to touch it")
        if not 1 < parts <= region.units:
            self._refuse(number, f"split into {parts}", f"2 to {region.units} parts")
        return replace(self, parts=(*self.parts[:number], parts, *self.parts[number + 1 :]))

    def _refuse(self, number: int, what: str, expected: str) -> NoReturn:
        raise CheckError(f"the fission candidate {number} of {len(self.regions[number].axes)} nodes cannot be {what}: expected {expected}")
