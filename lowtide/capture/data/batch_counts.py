"""The cumulative average of batch statistics: `BatchNorm(momentum=None)` weighs each batch by one over the count of batches so far.

The layer reads its count from a buffer and hands `1.0 / count` to the kernel. The count that it is given here is a stand-in unlike any
other number; by one over it the recorder knows the weight again and writes down how the step computes it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch.nn.modules import batchnorm

from lowtide.ir.graph import Arg, Value
from lowtide.ir.operators.row import ITEM

EmitScalar = Callable[[str, tuple[Arg, ...]], Value]  # writes down arithmetic on numbers: `Draft.emit_scalar`


def is_count_of_batches(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is read by torch's batch normalisation itself, which reads nothing but its count."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_machinery(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == batchnorm.__file__ and tensor.numel() == 1


def _is_machinery(module: str) -> bool:
    """Whether a module passes calls on: the recorder, or torch beneath its layers."""
    return module.startswith(("lowtide.capture", "torch.")) and not module.startswith("torch.nn.")


class BatchCounts:
    def __init__(self) -> None:
        self._random = random.Random(0)
        self._count_of: dict[float, Value] = {}  # by one over the stand-in

    def read(self, emit_scalar: EmitScalar, count: Value) -> int:
        stand_in = self._random.randrange(2**40, 2**41)
        value = emit_scalar(ITEM, (count,))
        self._count_of[1.0 / stand_in] = value
        return stand_in

    def share_of(self, emit_scalar: EmitScalar, number: float) -> Value | None:
        count = self._count_of.get(number)
        return None if count is None else emit_scalar("py.truediv", (1.0, count))
