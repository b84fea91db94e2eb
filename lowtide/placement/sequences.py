"""In which sequence to place blocks: by what they are, or outward in time from the section with the most bytes alive.

Every sequence starts with the blocks of fixed offsets; ties are broken by size, then by the caller's order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel
from lowtide.placement.strip import Strip
from lowtide.problems.placement import FREE, Ints

Order: TypeAlias = Literal[
    "size", "area", "lifetime", "start", "conflicts",  # the largest first, or the earliest
    "pressure", "pressure_size",  # first the blocks of sections with the most bytes alive: the longest of these, or the largest
    "outward", "outward_size",  # first the blocks nearest to the peak, in time
    "peak_end", "peak_start", "peak_lifetime", "peak_inner",  # the blocks at the peak, then forward and backward as time goes on
]  # fmt: skip
ORDERS: tuple[Order, ...] = get_args(Order)


def sequence(strip: Strip, order: Order) -> NDArray[np.intp]:
    """[n] the blocks of a strip, the first to be placed first."""
    keys = (*_KEYS[order](strip), -strip.blocks.size)
    return np.lexsort((*reversed(keys), strip.blocks.fixed == FREE))


def _by_size(strip: Strip) -> tuple[Ints, ...]:
    return -strip.blocks.size, -_lifetime(strip)


def _by_area(strip: Strip) -> tuple[Any, ...]:
    return (-strip.blocks.size.astype(np.float64) * _lifetime(strip),)


def _by_lifetime(strip: Strip) -> tuple[Ints, ...]:
    return (-_lifetime(strip),)


def _by_start(strip: Strip) -> tuple[Ints, ...]:
    return (strip.blocks.start,)


def _by_conflicts(strip: Strip) -> tuple[Ints, ...]:
    """How many lives meet a life: all that start before its end, less those that end before its start."""
    start, end = strip.blocks.start, strip.blocks.end
    return (np.searchsorted(np.sort(end), start, "right") - np.searchsorted(np.sort(start), end, "left"),)


def _by_pressure(strip: Strip) -> tuple[Ints, ...]:
    return -_pressure(strip), -_lifetime(strip)


def _by_pressure_and_size(strip: Strip) -> tuple[Ints, ...]:
    return (-_pressure(strip),)


def _outward(strip: Strip) -> tuple[Ints, ...]:
    return _distance(strip), -_lifetime(strip)


def _outward_by_size(strip: Strip) -> tuple[Ints, ...]:
    return (_distance(strip),)


def _from_peak(at_peak: Callable[[Strip], Ints]) -> Callable[[Strip], tuple[Ints, ...]]:
    """Blocks alive at the peak by a key of their own; then those after it as they start; then those before it, backward as they end."""

    def keys(strip: Strip) -> tuple[Ints, ...]:
        start, end = strip.blocks.start, strip.blocks.end
        after, before = start > strip.peak, end <= strip.peak
        where = np.select([after, before], [1, 2], 0)
        return where, np.select([after, before], [start, -end], at_peak(strip)), np.select([after, before], [-end, start], 0)

    return keys


def _late(strip: Strip) -> Ints:
    return -strip.blocks.end


def _early(strip: Strip) -> Ints:
    return strip.blocks.start


def _long(strip: Strip) -> Ints:
    return -_lifetime(strip)


def _central(strip: Strip) -> Ints:
    """Who reaches far from the peak on both sides comes first."""
    return -np.minimum(strip.blocks.end - strip.peak, strip.peak - strip.blocks.start)


def _lifetime(strip: Strip) -> Ints:
    return strip.blocks.end - strip.blocks.start


def _distance(strip: Strip) -> Ints:
    """Sections between each block's life and the peak, 0 where the life holds it."""
    return np.maximum(np.maximum(strip.blocks.start - strip.peak, strip.peak + 1 - strip.blocks.end), 0)


def _pressure(strip: Strip) -> Ints:
    """The most bytes alive at once during each block's life."""
    return _most_within(strip.live_bytes, strip.blocks.start, strip.blocks.end)


_KEYS: Mapping[Order, Callable[[Strip], tuple[Any, ...]]] = {
    "size": _by_size,
    "area": _by_area,
    "lifetime": _by_lifetime,
    "start": _by_start,
    "conflicts": _by_conflicts,
    "pressure": _by_pressure,
    "pressure_size": _by_pressure_and_size,
    "outward": _outward,
    "outward_size": _outward_by_size,
    "peak_end": _from_peak(_late),
    "peak_start": _from_peak(_early),
    "peak_lifetime": _from_peak(_long),
    "peak_inner": _from_peak(_central),
}


@kernel
def _most_within(values: Any, low: Any, high: Any) -> NDArray[np.int64]:
    """The largest of `values[low[i]:high[i]]` for each i, from a tree of maxima."""
    count, width = len(values), 1
    while width < count:
        width *= 2
    tree = np.zeros(2 * width, np.int64)
    tree[width : width + count] = values
    for at in range(width - 1, 0, -1):
        tree[at] = max(tree[2 * at], tree[2 * at + 1])
    most = np.zeros(len(low), np.int64)
    for index in range(len(low)):
        left, right = low[index] + width, high[index] + width
        while left < right:
            if left & 1:
                most[index] = max(most[index], tree[left])
                left += 1
            if right & 1:
                right -= 1
                most[index] = max(most[index], tree[right])
            left, right = left // 2, right // 2
    return most
