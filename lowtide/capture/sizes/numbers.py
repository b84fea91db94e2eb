"""Numbers that follow from sizes, such as the square root of a length, as the graph writes them: sizes, or arithmetic on them.

The bits are those of Python's own arithmetic. Sums and products of fractions are refused: sympy has put them in an order of its own by
then, which rounds otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._sympy import functions

from lowtide.capture.sizes.symbols import expression_of
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError
from lowtide.ir.graph import Arg, Value
from lowtide.ir.shapes.polynomial import normal

EmitScalar = Callable[[str, tuple[Arg, ...]], Value]
_BINARY = {functions.FloatPow: "py.pow", functions.FloatTrueDiv: "py.truediv", functions.IntTrueDiv: "py.truediv"}
_UNARY = {"OpaqueUnaryFn_sqrt": "py.math_sqrt", "OpaqueUnaryFn_log": "py.math_log", "OpaqueUnaryFn_exp": "py.math_exp"}


def fraction_of(item: torch.SymFloat, emit: EmitScalar) -> Arg:
    """The value of a symbolic fraction. Raises CaptureError for one whose last bits nobody knows."""
    found = _written(expression_of(item), emit)
    return found if isinstance(found, (Value, float)) else emit("py.truediv", (found, 1))


def _written(expr: Any, emit: EmitScalar) -> Arg:
    if expr.is_Float:
        return float(expr)
    if isinstance(expr, functions.ToFloat):
        return normal(expr.args[0])
    if expr.is_integer:
        return normal(expr)
    op = _BINARY.get(type(expr)) or _UNARY.get(type(expr).__name__)
    if op is None:
        raise CaptureError(
            f"a number at {users_line()} follows from the batch's dimensions by {expr}, whose last bits a graph cannot promise: compute it "
            "with tensors, or leave its dimension out of `dynamic`"
        )
    return emit(op, tuple(_written(each, emit) for each in expr.args))
