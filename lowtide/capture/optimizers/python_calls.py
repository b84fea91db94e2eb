"""Python's arithmetic on numbers: what can be recorded, what it computes, and functions that would otherwise see a stand-in.

`max`, `min` and the functions of `math` take a traced number for the bare float that it is by inheritance. While an optimizer's step is
traced, they hand such numbers to the trace; for all others they are what they were.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from lowtide.base.kernels import COMPILING
from lowtide.capture.care.turns import replaced
from lowtide.ir.operators.names import MATH_FUNCTIONS

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "is": operator.is_,
    "is float": lambda item, expected: isinstance(item, float) is expected,
}  # fmt: skip
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
    "floordiv": operator.floordiv, "mod": operator.mod, "pow": operator.pow,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {"neg": operator.neg, "abs": abs, "max": max, "min": min}
_MATH: dict[str, Callable[..., Any]] = {name: getattr(math, name) for name in sorted(MATH_FUNCTIONS)}


def compute(op: str, operands: Sequence[Any]) -> Any:
    """What recorded arithmetic comes to."""
    return (ARITHMETIC.get(op) or _FUNCTIONS.get(op) or _MATH[op.removeprefix("math_")])(*operands)


@contextmanager
def traced_calls(is_traced: Callable[[Any], bool], apply: Callable[[str, tuple[Any, ...]], Any]) -> Iterator[None]:
    """While this lasts, functions of Python that are given a traced number among plain ones record what they do, on this thread.

    Nothing is compiled meanwhile, on any thread: numba knows functions by their identity.
    """

    def following(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
            if not kwargs and any(map(is_traced, given)) and all(isinstance(item, (int, float)) for item in given):
                return apply(name, tuple(given))
            return original(*args, **kwargs)

        return call

    with COMPILING, ExitStack() as stack:
        for module, name in ((builtins, "max"), (builtins, "min"), *((math, name) for name in _MATH)):
            recorded = name if module is builtins else f"math_{name}"
            stack.enter_context(replaced(module, name, partial(following, recorded)))
        yield
