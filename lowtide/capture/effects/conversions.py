"""`float(loss)`, `int(count)`, `str(x)`: Python makes its own kind of whatever they give, so calls of these are followed."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.capture.effects.sums import NumberExpression, Term, is_term, text_of, whole
from lowtide.capture.results import is_number

NAMES = ("float", "int", "str")


def converted(kind: Any, *args: Any, **options: Any) -> Any:
    """What such a type makes of a number of the step, or of a size; all else is called as it is."""
    if len(args) != 1 or options or kind not in (float, int, str):
        return kind(*args, **options)
    (item,) = args
    if kind is str:
        return text_of(str, item)
    if isinstance(item, (torch.SymInt, torch.SymFloat)):
        return torch.sym_float(item) if kind is float else torch.sym_int(item)
    number = number_of(item)
    if is_number(number) and (is_term(number) or not isinstance(number, Term)) and number.kind is kind:
        return number
    if not is_term(number):
        return kind(number)
    return NumberExpression(float, (number,)) if kind is float else whole(int, number)


def number_of(item: Any) -> Any:
    """What `item()` of a tensor gives that the step computes; all else is itself."""
    return item.item() if issubclass(type(item), FakeTensor) else item
