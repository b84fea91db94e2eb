"""`float(loss)`, `int(count)`, `str(x)`: Python makes its own kind of whatever they give, so these names stand for others here.

They stand in the globals of functions that name them, and are like Python's own but for `is`, which is why they stay out of modules that
compare with it.
"""

from __future__ import annotations

import builtins
import dis
import gc
import types
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.base.garbage import look_at_all
from lowtide.capture.effects.sums import NumberExpression, Term, is_term, text_of, whole
from lowtide.capture.results import is_number

NAMES = ("float", "int", "str")


class _Standing(type):
    """The type of what stands for a type: whatever is asked of it, that one answers."""

    real: type

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if cls.real is str:
            return text_of(str, *args) if len(args) == 1 and not options else str(*args, **options)
        if len(args) == 1 and not options and isinstance(args[0], (torch.SymInt, torch.SymFloat)):
            return torch.sym_float(args[0]) if cls.real is float else torch.sym_int(args[0])
        if len(args) == 1 and not options and is_number(number := number_of(args[0])) and (is_term(number) or not isinstance(number, Term)):
            if number.kind is cls.real:
                return number
            if cls.real is float and is_term(number):  # the other way it might fail, once the step has run
                return NumberExpression(float, (number,))
            if is_term(number):
                return whole(int, number)
        return cls.real(*args, **options)

    def __instancecheck__(cls, item: Any) -> bool:
        return isinstance(item, cls.real)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.real)

    def __eq__(cls, other: object) -> bool:
        return other is cls.real or other is cls

    def __hash__(cls) -> int:
        return hash(cls.real)


STANDING: dict[str, Any] = {name: _Standing(name, (getattr(builtins, name),), {"real": getattr(builtins, name)}) for name in NAMES}


def stand_in(function: types.FunctionType, named: set[str], undo: Callable[[Callable[[], object]], None]) -> None:
    """Put them into the globals of a function that names them."""
    table: dict[str, Any] = function.__globals__
    for name in NAMES:
        if name in named and name not in table and not _is_compared(name, table):
            undo(lambda name=name: table.pop(name, None))  # type: ignore[misc]
            table[name] = STANDING[name]


def number_of(item: Any) -> Any:
    """What `item()` of a tensor gives that the step computes; all else is itself."""
    return item.item() if issubclass(type(item), FakeTensor) else item


def _is_compared(name: str, table: dict[str, Any]) -> bool:
    """Whether a function of this module asks for that very type."""
    look_at_all()
    waiting = [each.__code__ for each in gc.get_objects() if type(each) is types.FunctionType and each.__globals__ is table]
    while waiting:
        code = waiting.pop()
        waiting.extend(each for each in code.co_consts if isinstance(each, types.CodeType))
        if name in code.co_names:
            steps = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
            if any(one.argval == name and two.opname == "IS_OP" for one, two in pairwise(steps)):
                return True
    return False
