"""Few orders for a whole range: of those found at points, as few are kept as stay near the least peak at each of them."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

_MOST_TRIED = 20_000  # sets of orders, before the choice is made one order at a time


def fewest(near: NDArray[np.bool_], peaks: NDArray[np.int64]) -> list[int]:
    """The orders to keep [orders, points]: as few as are near the least at every point, of as few those of least peaks in all.

    Some order must be near at each point.
    """
    rows, tried = range(len(near)), 0
    for size in range(1, len(near) + 1):
        sets = list(combinations(rows, size)) if _count(len(near), size) + tried <= _MOST_TRIED else []
        if not sets:
            return one_by_one(near)
        tried += len(sets)
        enough = [chosen for chosen in sets if near[list(chosen)].any(axis=0).all()]
        if enough:
            return list(min(enough, key=lambda chosen: (int(peaks[list(chosen)].min(axis=0).sum()), chosen)))
    raise AssertionError("each point's own order is near its least")


def _count(rows: int, size: int) -> int:
    result = 1
    for position in range(size):
        result = result * (rows - position) // (position + 1)
    return result


def one_by_one(near: NDArray[np.bool_]) -> list[int]:
    """The rows to keep of [rows, columns], so that each column has one: each time that which serves most of those not served yet."""
    kept: list[int] = []
    left = np.ones(near.shape[1], np.bool_)
    while left.any():
        kept.append(int((near & left).sum(axis=1).argmax()))
        left &= ~near[kept[-1]]
    return sorted(kept)
