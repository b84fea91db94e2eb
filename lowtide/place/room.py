"""Whose bytes alive fit into a capacity, when lives are taken one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel
from lowtide.problems.placement import Ints


def with_room(
    size: Ints, start: Ints, end: Ints, order: NDArray[np.intp], must: NDArray[np.bool_], capacity_bytes: int
) -> NDArray[np.bool_]:
    """[n] whether each is taken: in `order`, all that `must`, and others as long as nowhere in their lives more than the capacity is alive.

    Each costs time in proportion to the starts and ends of others within its life.
    """
    events = np.unique(np.concatenate([start, end]))
    low, high = np.searchsorted(events, start), np.searchsorted(events, end)
    return _taken(size, low, high, order, must, capacity_bytes, np.zeros(max(len(events), 1), np.int64))


@kernel
def _taken(size: Any, low: Any, high: Any, order: Any, must: Any, capacity: Any, live: Any) -> NDArray[np.bool_]:
    taken = np.zeros(len(size), np.bool_)
    for one in order:
        most = 0
        for at in range(low[one], high[one]):
            most = max(most, live[at])
        if must[one] or most + size[one] <= capacity:
            taken[one] = True
            for at in range(low[one], high[one]):
                live[at] += size[one]
    return taken
