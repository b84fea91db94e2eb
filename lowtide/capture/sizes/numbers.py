"""Numbers that follow from sizes, such as the square root of a length, as the graph writes them: sizes, or arithmetic on them.

The bits are those of Python's own arithmetic. What torch knows of a fraction is sympy's, which puts sums and products in an order of its
own, and rounds otherwise. So each operation notes what it was given, and the graph computes in the program's order.

Functions that take numbers alone, called with symbolic sizes: `math.sqrt(x.shape[1])`, `torch.linspace(0, 1, x.shape[1])`.

While a capture lasts, on its thread, what they compute is recorded of the size. `len()` and `range()` cannot be among them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx.experimental.sym_node import SymNode
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils._sympy import functions

from lowtide.capture.care.turns import all_replaced
from lowtide.capture.effects.stand_ins import SHOWS_A_SIZE, LeavingError
from lowtide.capture.sizes.symbols import expression_of, is_symbolic, size_of
from lowtide.capture.sources import is_called_by_user, users_line
from lowtide.errors import CaptureError
from lowtide.ir.graph import Arg, Value
from lowtide.ir.operators.row import MATH_FUNCTIONS

EmitScalar = Callable[[str, tuple[Arg, ...]], Value]
_FLOAT = "float"
_OPERATIONS = {
    "add": "add", "sub": "sub", "mul": "mul", "neg": "neg", "abs": "abs", "float_truediv": "truediv", "int_truediv": "truediv",
    "float_pow": "pow", "sym_float": _FLOAT, **{f"sym_{of}": f"math_{of}" for of in MATH_FUNCTIONS if hasattr(SymNode, f"sym_{of}")},
}  # fmt: skip
_opaque: dict[str, Any] = {}  # functions of sympy's that nothing is known of, by name


def function_of_size(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `math` that takes one number, also where that is a symbolic one."""

    def function(*args: Any) -> Any:
        if len(args) != 1 or not isinstance(args[0], (torch.SymInt, torch.SymFloat)):
            return plain(*args)
        given = torch.sym_float(args[0]).node
        opaque = _opaque.setdefault(name, functions.make_opaque_unary_fn(name))
        node = SymNode(opaque(given.expr), given.shape_env, float, plain(given.hint))
        node.recipe = f"math_{name}", (given,)  # type: ignore[attr-defined]
        return torch.SymFloat(node)

    return function


def _noting(op: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def operation(*nodes: Any) -> Any:
        result = plain(*nodes)
        if result.pytype is float and not any(result is each for each in nodes):
            if _number(result) is not None and any(_number(each) is None for each in nodes):  # sympy takes it for one number
                raise _unknown(nodes[0].expr)
            result.recipe = op, nodes
        return result

    return operation


def fraction_of(item: torch.SymFloat, emit: EmitScalar) -> Arg:
    """The value of a symbolic fraction. Raises CaptureError for one whose last bits nobody knows."""
    number = _as_made(item.node, emit)
    return number if isinstance(number, (Value, float)) else emit("py.truediv", (number, 1))


def _as_made(node: Any, emit: EmitScalar) -> Arg:
    if (number := _number(node)) is not None:
        return number
    if node.pytype is int:
        return size_of(torch.SymInt(node))
    op, given = getattr(node, "recipe", ("", ()))
    if not op:  # by an operation that is not among those above
        raise _unknown(expression_of(torch.SymFloat(node)))
    operands = [_as_made(each, emit) for each in given]
    if op == _FLOAT:
        return operands[0]
    if op != "truediv" and not any(isinstance(each, (Value, float)) for each in operands):
        operands[0] = emit("py.truediv", (operands[0], 1))  # else Python would compute with whole numbers
    return emit(f"py.{op}", tuple(operands))


def _number(node: Any) -> Arg:
    number: Arg = node.maybe_as_int() if node.pytype is int else node.maybe_as_float()
    return number


def _unknown(expr: Any) -> CaptureError:
    return CaptureError(
        f"a number at {users_line()} follows from the batch's dimensions by {expr}, whose last bits a graph cannot promise: compute it "
        "with tensors, or leave its dimension out of `dynamic`"
    )


_ATEN = torch.ops.aten
_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_OTHERS = {"ceil", "floor", "pow", "fabs"}  # which torch has for sizes, or which take two numbers
_Function = Callable[..., Any]


def called_with_sizes() -> AbstractContextManager[None]:
    """While this lasts, they follow sizes, and operations that give fractions note what they were given."""
    return all_replaced(
        (
            *((SymNode, method, partial(_noting, op)) for method, op in _OPERATIONS.items()),
            *((math, name, partial(function_of_size, name)) for name in sorted(MATH_FUNCTIONS - _OTHERS)),
            *((kind, "__repr__", _shown) for kind in (*_SYMBOLIC, torch.SymBool)),
            (torch, "tensor", _tensor),
            (torch, "linspace", partial(_spaced, _ATEN.linspace.default)),
            (torch, "logspace", partial(_spaced, _ATEN.logspace.default)),
        )
    )


def _shown(plain: _Function) -> _Function:
    def representation(size: Any) -> str:
        """A text for torch and lowtide: the user's own code would put it somewhere, or decide by it."""
        if is_called_by_user(sys._getframe(1)):
            raise LeavingError(SHOWS_A_SIZE, converts=True)
        return plain(size)  # type: ignore[no-any-return]

    return representation


def _tensor(plain: _Function) -> _Function:
    def tensor(data: Any, *, dtype: torch.dtype | None = None, **settings: Any) -> torch.Tensor:
        items = data if isinstance(data, (list, tuple)) else (data,)
        if not any(isinstance(each, _SYMBOLIC) for each in items):
            return plain(data, dtype=dtype, **settings)  # type: ignore[no-any-return]
        whole = all(is_symbolic(each) or isinstance(each, int) for each in items)
        scalars = [torch.full((), each, dtype=dtype or (torch.int64 if whole else torch.get_default_dtype()), **settings) for each in items]
        return scalars[0] if items is not data else torch.stack(scalars)

    return tensor


def _spaced(op: OpOverload, plain: _Function) -> _Function:
    def spaced(start: Any, end: Any, steps: Any, *base: Any, **settings: Any) -> torch.Tensor:
        known = settings.keys() <= {"dtype", "device", "base"} and not any(isinstance(each, torch.Tensor) for each in (start, end))
        if not is_symbolic(steps) or not known or _get_current_dispatch_mode() is None:
            return plain(start, end, steps, *base, **settings)  # type: ignore[no-any-return]
        base = (*base, *([settings.pop("base")] if "base" in settings else []))
        settings["device"] = torch.device(settings.get("device") or torch.get_default_device())
        with _pop_mode_temporarily() as recorder:  # the operator itself takes a number: it is recorded without being called
            return recorder.__torch_dispatch__(op, (), (start, end, steps, *base), {**settings, "pin_memory": False})  # type: ignore[no-any-return]

    return spaced
