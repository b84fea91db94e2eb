"""All that could be joined, and what the model makes of it: where that is next to nothing, it is worth measuring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowtide.fuse.cluster.partition import Partition
from lowtide.fuse.reform.chains import Part, chains_of, parts_of
from lowtide.fuse.reform.join import MOST_PARTS, Costs
from lowtide.fuse.reform.schemes import Scheme, schemes_of


@dataclass(frozen=True, eq=False)
class JoinCandidate:
    """Parts that could be one kernel, and what that would take by prediction, against each alone."""

    parts: tuple[Part, ...]
    scheme: Scheme
    joined_us: float
    apart_us: float

    @property
    def gain(self) -> float:
        """By how much joined would be faster, as a share of apart."""
        return 1.0 - self.joined_us / self.apart_us if self.apart_us else 0.0


def candidates(partition: Partition, costs: Costs) -> Iterator[JoinCandidate]:
    for parts in parts_of(partition):
        for chain in chains_of(parts, partition):
            yield from _of_chain(chain, costs)


def _of_chain(chain: Sequence[Part], costs: Costs) -> Iterator[JoinCandidate]:
    for start in range(len(chain)):
        for end in range(start + 2, min(start + MOST_PARTS, len(chain)) + 1):
            run = tuple(chain[start:end])
            for shape in schemes_of(run, costs.threads):
                joined = costs.joined_us(run, shape)
                if joined is not None:
                    yield JoinCandidate(run, shape.scheme, joined, sum(map(costs.alone_us, run)))
