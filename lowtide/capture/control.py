"""Operators that call functions (`torch.cond`, `scan`, `while_loop`): refused before torch looks for a kernel that a capture has not."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch
from torch._ops import HigherOrderOperator, _higher_order_ops

from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError


def refuse_called(key: torch._C.DispatchKey) -> None:
    """Have all such operators end at a dispatch key that is looked at during a capture alone."""
    for op in _higher_order_ops.values():
        if key not in op.py_kernels:
            op.py_impl(key)(partial(_refuse, op))


def _refuse(op: HigherOrderOperator, *args: Any, **kwargs: Any) -> NoReturn:
    raise CaptureError(
        f"{op.name()} at {users_line()} calls functions, and makes their gradient by a trace of its own, which no capture can follow: "
        "write it with Python's own `if`, `for` or `while`, whose answers a step checks at each call"
    )
