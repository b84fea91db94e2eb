"""Texts made of numbers that only the running step knows: `f"{loss.item():.3f}"`, `"%.3f" % x`, `"{}".format(x)`, `", ".join(...)`.

And `float(loss)`, `int(count)`, `str(x)`: Python makes its own kind of whatever they give, so calls of these are followed. What all these
give is an expression that each step computes again. What has no such numbers is what it was.
"""

from __future__ import annotations

import itertools
import operator
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.capture.effects.sums import NumberExpression, Term, is_term, numbers_in, text_of, whole
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


_AS_SHOWN: dict[int, Callable[[Any], str]] = {ord("s"): str, ord("r"): repr, ord("a"): ascii}
_FIELD = re.compile(r"%[#0\- +]*\d*(?:\.\d+)?[hlL]?([a-zA-Z%])")


def formatted(value: Any, conversion: int, spec: Any) -> Any:
    """`f"{value!r:>8}"`."""
    if conversion in _AS_SHOWN:
        value = text_of(_AS_SHOWN[conversion], value)
    elif issubclass(type(value), FakeTensor) and not value.dim():
        value = number_of(value)
    return format(value, spec) if str(spec).endswith("c") else text_of(format, value, spec)  # `c` fails for some numbers


def joined(*pieces: Any) -> Any:
    """Texts one behind the other."""
    return text_of(_filled, "%s" * len(pieces), *pieces)


def modulo(one: Any, two: Any) -> Any:
    """`"%.3f" % x`, and the remainder of numbers."""
    values = two if type(two) is tuple else (two,)
    if type(one) is not str or not any(is_term(each) or type(each) is FakeTensor for each in (*values, *numbers_in(values))):
        return operator.mod(one, two)
    letters = [each for each in _FIELD.findall(one) if each != "%"]
    if len(letters) != len(values):
        return operator.mod(one, two)
    values = tuple(each if letter in "sra" else number_of(each) for letter, each in zip(letters, values, strict=True))
    fractions = {letter for letter, each in zip(letters, values, strict=True) if is_term(each) and each.kind is float}
    if fractions - {*"sradiueEfFgG"}:  # fails for some
        return operator.mod(one, two)
    values = tuple(whole(int, each) if letter in "diu" and is_term(each) else each for letter, each in zip(letters, values, strict=True))
    return text_of(_filled, one, *values)


def _filled(template: str, *values: Any) -> str:
    return template % values


def called(item: Any, name: str, /, *args: Any, **named: Any) -> Any:
    """A method of a text, or one of that name of anything else."""
    if type(item) is str and name == "format":
        return _from_template(item, args, named, itertools.count())
    if type(item) is str and len(args) == 1 and not named:
        pieces = [*args[0]]
        args = (pieces,)
        if any(is_term(each) for each in pieces):
            return joined(*[each for piece in pieces for each in (item, piece)][1:])
    return getattr(item, name)(*args, **named)


def _from_template(template: str, args: Sequence[Any], named: Mapping[str, Any], numbers: Iterator[int]) -> Any:
    formatter, pieces = string.Formatter(), list[Any]()
    for literal, name, spec, conversion in formatter.parse(template):
        pieces.append(literal)
        if name is not None:
            name = f"{next(numbers)}{name}" if name[:1] in ("", ".", "[") else name
            value, _ = formatter.get_field(name, args, named)
            pieces.append(formatted(value, ord(conversion or "\0"), _from_template(spec or "", args, named, numbers)))
    return joined(*pieces)
