"""How long samples are: a histogram in the shape of CodeAlpaca-20K's.

The paper says of that data set that its texts have from about 100 to 3,000 characters. No copy of it was at hand: the counts below are not
taken from it but made by hand, with the paper's two ends, most samples of a few hundred characters, and a long tail, as instruction data
has. One token stands for six characters, so that the longest sample has 500 tokens and a step takes about a second on two cores.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

CHARACTERS_A_TOKEN = 6
# Characters from and below, and how many of a thousand samples.
HISTOGRAM = (
    (100, 200, 95), (200, 300, 165), (300, 400, 185), (400, 500, 160), (500, 600, 120), (600, 800, 135),
    (800, 1000, 65), (1000, 1500, 52), (1500, 2000, 15), (2000, 2500, 5), (2500, 3001, 3),
)  # fmt: skip
SHORTEST = HISTOGRAM[0][0] // CHARACTERS_A_TOKEN  # tokens
LONGEST = (HISTOGRAM[-1][1] - 1) // CHARACTERS_A_TOKEN


def drawn(count: int, generator: random.Random) -> list[int]:
    """The lengths of so many samples, in tokens: bins by their counts, evenly within a bin."""
    weights = [samples for _, _, samples in HISTOGRAM]
    bins = generator.choices(HISTOGRAM, weights, k=count)
    return [generator.randrange(least, below) // CHARACTERS_A_TOKEN for least, below, _ in bins]


def batches(steps: int, batch_size: int, seed: int = 0) -> list[list[int]]:
    """The lengths of the samples of each batch; the last one has a sample of the longest kind, which training meets sooner or later."""
    generator = random.Random(f"{seed}, {batch_size}")
    found = [drawn(batch_size, generator) for _ in range(steps)]
    found[-1][0] = LONGEST
    return found


def bucket(length: int) -> int:
    """The power of two that a length is padded to; the last bucket ends at the longest sample, as in the paper."""
    return min(1 << (length - 1).bit_length(), LONGEST)


def shapes(lengths: Sequence[Sequence[int]]) -> list[int]:
    """What each batch is padded to."""
    return [max(batch) for batch in lengths]
