"""A remat problem as kernels take it: arrays by node and by tensor, rows of identifiers laid end to end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.problems.order import Bytes, Ints

Times = NDArray[np.float64]


class RematArrays(NamedTuple):
    """A `RematProblem` as kernels take it."""

    cost_us: Times  # what a run counts for in sums
    device_us: Times  # what it takes the device
    issue_us: Times  # and the host, to issue it; 0 where the host itself computes
    handling_us: Times  # [1] what it takes the host to issue a copy, or a wait for one
    repeatable: NDArray[np.bool_]
    limit_ptr: Ints
    limit_ids: Ints
    read_ptr: Ints
    read_ids: Ints
    made_ptr: Ints
    made_ids: Ints
    take_ptr: Ints
    take_ids: Ints
    take_output: Ints
    tensor_bytes: Bytes
    made_bytes: Bytes
    workspace_bytes: Bytes
    kept: NDArray[np.bool_]
    producer: Ints
    storable: NDArray[np.bool_]  # may be stored, dropped and loaded
    offloaded: NDArray[np.bool_]  # of these, the caller's own: there from the start, and again in the end
    store_us: Times
    load_us: Times
    write_ptr: Ints
    write_ids: Ints
