"""What the exact placer knows to fail: components of a problem, each with the floors of the buffers not placed in it.

Whether a component fits within a capacity depends on nothing else; so what failed once fails again, however it is come by, and under every
smaller capacity too. A component is known by 128 bits, sums over its buffers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lowtide.base.kernels import kernel
from lowtide.placement.exact.floors import FloorWalk
from lowtide.placement.exact.sections import SectionNet


class SeenStates(NamedTuple):
    """Open addressing over a power of two of slots; forgets everything when three quarters are taken."""

    words: Any  # [slots, 2] uint64; both 0 where a slot is free
    count: Any  # [1] slots taken


def new_seen(slots: int) -> SeenStates:
    """Nothing seen; `slots` is a power of two."""
    return SeenStates(np.zeros((slots, 2), np.uint64), np.zeros(1, np.int64))


@kernel
def state_of(net: SectionNet, walk: FloorWalk, left: Any, right: Any) -> Any:
    """Two words for the component of sections `[left, right)`."""
    one, two = np.uint64(left), np.uint64(right)
    for buffer in range(net.first[left], net.first[right]):
        if not walk.placed[buffer]:
            floor = np.uint64(walk.floor[buffer])
            one += _mixed(floor + net.key[buffer, 0])
            two += _mixed(floor ^ net.key[buffer, 1])
    return one, two


@kernel
def is_seen(seen: SeenStates, one: Any, two: Any) -> Any:
    place = _slot(seen, one, two)
    return seen.words[place, 0] != 0 or seen.words[place, 1] != 0


@kernel
def see(seen: SeenStates, one: Any, two: Any) -> None:
    if 4 * seen.count[0] > 3 * len(seen.words):
        seen.words[:] = 0
        seen.count[0] = 0
    place = _slot(seen, one, two)
    seen.count[0] += seen.words[place, 0] == 0 and seen.words[place, 1] == 0
    seen.words[place, 0], seen.words[place, 1] = one, two


@kernel
def enlarge(seen: SeenStates, larger: SeenStates) -> None:
    for place in range(len(seen.words)):
        if seen.words[place, 0] != 0 or seen.words[place, 1] != 0:
            see(larger, seen.words[place, 0], seen.words[place, 1])


@kernel
def _slot(seen: SeenStates, one: Any, two: Any) -> Any:
    """Where these words are, or the free slot where they belong."""
    last = len(seen.words) - 1
    place = np.int64(one & np.uint64(last))
    while seen.words[place, 0] != 0 or seen.words[place, 1] != 0:
        if seen.words[place, 0] == one and seen.words[place, 1] == two:
            break
        place = (place + 1) & last
    return place


@kernel
def _mixed(word: Any) -> Any:
    """A bijection of 64 bits after which equal differences no longer show (splitmix64's)."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
