"""A lower bound on every arena that knows of alignment: what is lost between buffers that must start at multiples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel
from lowtide.placement.strip import Strip
from lowtide.problems.placement import PlaceProblem


def arena_bound_bytes(problem: PlaceProblem) -> int:
    """No arena is smaller; at least `problem.lower_bound_bytes`.

    Let g divide every alignment. Then all offsets are multiples of g, so of the buffers alive in a section each but the highest takes its
    size rounded up to g. The highest is at best the one that rounding would add most to: the bound is the rounded sizes less that.
    """
    return max(problem.lower_bound_bytes, _aligned_bytes(Strip.of(problem)))


def _aligned_bytes(strip: Strip) -> int:
    size, start, end, _, _ = strip.blocks
    grain = strip.grain_bytes
    if grain == 1:
        return 0
    slack = -size % grain
    change = np.zeros(len(strip.live_bytes) + 1, np.int64)
    np.add.at(change, start, slack)
    np.subtract.at(change, end, slack)
    most = _most_alive(np.argsort(-slack, kind="stable"), slack, start, end, len(strip.live_bytes))
    return int((strip.live_bytes + np.cumsum(change)[:-1] - most).max(initial=0))


@kernel
def _most_alive(order: Any, weight: Any, start: Any, end: Any, count: Any) -> NDArray[np.int64]:
    """By section: the largest weight among the lives that hold it; `order` is by falling weight, and paints what nobody has painted."""
    most = np.zeros(count, np.int64)
    onward = np.arange(count + 1)  # the first section from here that is not painted, or a step on the way there
    for block in order:
        section = start[block]
        while True:
            root = section
            while onward[root] != root:
                root = onward[root]
            while onward[section] != root:
                onward[section], section = root, onward[section]
            if root >= end[block]:
                break
            most[root] = weight[block]
            onward[root] = section = root + 1
    return most
