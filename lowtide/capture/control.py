"""Functions that torch compiles, and operators that call functions, before torch looks for a kernel that a capture has not.

`torch.cond` and `torch.while_loop` are Python's `if` and `while`: what they decide by is read, and checked by each step. All others
(`scan`, `associative_scan`) are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch._ops import HigherOrderOperator, _higher_order_ops

from lowtide.capture.care.turns import replaced
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError


@contextmanager
def compiling_nothing() -> Iterator[None]:
    """What runs inside, on this thread, runs as it is written. Dynamo would leave it alone as well, under a mode, but for good."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is not None:
        with replaced(frames, "_callback_from_stance", lambda _: lambda callback: None):
            yield
        return
    try:
        yield
    finally:
        if (dynamo := sys.modules.get("torch._dynamo")) is not None:
            dynamo.reset()  # nothing was compiled before


def take_called(key: torch._C.DispatchKey) -> None:
    """Have all such operators end at a dispatch key that is looked at during a capture alone."""
    own: dict[str, Callable[..., Any]] = {
        "cond": lambda predicate, true, false, operands: (true if predicate else false)(*operands),
        "while_loop": _while_loop,
    }
    for name, op in _higher_order_ops.items():
        if key not in op.py_kernels:
            op.py_impl(key)(own.get(name, partial(_refuse, op)))


def _while_loop(condition: Callable[..., Any], body: Callable[..., Any], carried: Sequence[Any], more: Sequence[Any]) -> Any:
    while condition(*carried, *more):
        carried = body(*carried, *more)
    return tuple(carried)


def _refuse(op: HigherOrderOperator, *args: Any, **kwargs: Any) -> NoReturn:
    remedy = "write it with Python's own `if`, `for` or `while`, whose answers a step checks at each call"
    if op.name().startswith("flex_attention"):
        remedy = "use functional.scaled_dot_product_attention with attn_mask= or is_causal="
    raise CaptureError(
        f"{op.name()} at {users_line()} calls functions, and makes their gradient by a trace of its own, which no capture can follow: "
        f"{remedy}"
    )
