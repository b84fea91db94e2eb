"""One price a node for searches, where a step has two clocks: the host issues operators in order, the device runs them in order.

Neither sum is the time of a step: that is simulated (`cost.time_kernel`). But whatever a sequence is, it takes at least the sum of what its
runs take the device, and at least the sum of what they take the host; so also any mean of both. A price that is such a mean adds up, and a
bound made of it holds. Where the device is busy throughout, its time is what recomputation costs; where it waits for the host, the host's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.ir.graph import Graph, Value
from lowtide.ir.operators.nodes import is_view
from lowtide.remat.facts import Times

_HOST_ALONE, _DEVICE_ALONE = 0.5, 1.5  # times as long as the host takes: from where on the one or the other is all that counts


class Clocks(NamedTuple):
    """What a run of each node takes, by both clocks."""

    device_us: Times  # [n]
    issue_us: Times  # [n] of the host, with views

    def price_us(self, repeatable: NDArray[np.bool_]) -> Times:
        """[n] what a run counts for. What may run again decides for which clock it is."""
        on_device, on_host = float(self.device_us[repeatable].sum()), float(self.issue_us[repeatable].sum())
        if on_device >= _DEVICE_ALONE * on_host:
            return self.device_us
        share = max(0.0, (on_device / on_host - _HOST_ALONE) / (_DEVICE_ALONE - _HOST_ALONE))
        return share * self.device_us + (1 - share) * self.issue_us


def with_views(graph: Graph, issue_us: Sequence[float]) -> list[float]:
    """By node, with what it takes to issue the views of what it makes; those of what the caller owns are counted at their first reader."""
    found = [0.0 if is_view(node) else us for node, us in zip(graph.nodes, issue_us, strict=True)]
    maker: dict[Value, int] = {}
    waiting: dict[Value, float] = {}
    for index, node in enumerate(graph.nodes):
        before_us = sum(waiting.pop(value, 0.0) for value in node.inputs)
        made = [value for value in node.outputs if value is not None]
        at = next((maker[value] for value in node.inputs if value in maker), None) if is_view(node) else index
        if is_view(node):
            before_us += issue_us[index]
        if at is not None:
            found[at] += before_us
            maker.update(dict.fromkeys(made, at))
        elif made:
            waiting[made[0]] = before_us
    return found
