"""Functions that torch compiles or that torch.jit has compiled, and operators that call functions.

`torch.cond` and `torch.while_loop` are Python's `if` and `while`: what they decide by is read, and checked by each step. All others
(`scan`, `associative_scan`) are refused.

What torch.jit.script compiled is refused: torch differentiates it by formulas of its own once it ran, which no mode sees.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch._ops import HigherOrderOperator, _higher_order_ops

from lowtide.capture.care.turns import replaced
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError

_COUNTS = "set_fullgraph_compiled_frame_count"  # by which `fullgraph=True` raises where nothing was compiled; a torch may be without


@contextmanager
def compiling_nothing() -> Iterator[None]:
    """What runs inside, on this thread, runs as it is written. Dynamo would leave it alone as well, under a mode, but for good."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is not None:
        with replaced(frames, "_callback_from_stance", lambda _: lambda callback: None), ExitStack() as stack:
            if hasattr(frames, _COUNTS):
                stack.enter_context(replaced(frames, _COUNTS, lambda _: lambda count: 0))
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


_NOTHING = "def nothing(number: int) -> int:\n    return number\n"


class Scripts:
    """What TorchScript runs in this thread from here on."""

    def __init__(self) -> None:
        torch.jit.CompilationUnit(_NOTHING).nothing(0)  # so that a known graph was the last to run
        self._last = torch._C._last_executed_optimized_graph()

    def refuse(self) -> None:
        """Raise CaptureError where a compiled function took a tensor that requires gradients. Others compute what eager does."""
        last = torch._C._last_executed_optimized_graph()
        if last is self._last:
            return
        self._last = last
        text = str(last)
        if "requires_grad=1" in text or "DifferentiableGraph" in text:
            raise CaptureError(
                f"a function compiled by torch.jit.script ran before {users_line()}: torch differentiates it by formulas of its own, which "
                "change after its first calls, so that no capture can follow. Call the plain function (without torch.jit.script), or set "
                "PYTORCH_JIT=0 in the environment before torch is imported, where a library compiles it"
            )
