"""Sizes as text and back: "64", "4*s28*s73**2", "Max(1, s0)", "floor(s0/2)".

    sum     = product (("+" | "-") product)*
    product = factor (("*" | "/" | "//") factor)*
    factor  = "-" factor | atom ("**" factor)?
    atom    = INTEGER | DIMENSION | FUNCTION "(" sum ("," sum)* ")" | "(" sum ")"

A text is only ever taken apart by this grammar, never executed. A dimension read from text is an integer of 0 or more; expressions are
written as they read back, so that what is written, read and written again stays the same text.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import sympy

from lowtide.errors import FormatError
from lowtide.ir.sizes import Size

# Beyond any real size: a hostile text must not keep the reader busy.
_MAX_DIGITS, _MAX_TOKENS, _MAX_DEPTH, _MAX_POWER, _MAX_BITS = 40, 250, 50, 16, 1024
_TOKEN = re.compile(r"\s*(?:(\d+|[^\W\d]\w*|\*\*|//|[-+*/(),])|(\S))")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Max": sympy.Max,
    "Min": sympy.Min,
    "Mod": sympy.Mod,
    "floor": sympy.floor,
    "ceiling": sympy.ceiling,
}
_ARITIES = {"Mod": 2, "floor": 1, "ceiling": 1}


def size_text(size: Size) -> str:
    """A size as text. Raises FormatError for an expression that the grammar does not hold, and for numbers of more than 40 digits."""
    return str(size) if type(size) is int and -(10**18) < size < 10**18 else _size_text(size)


def canonical(size: Size) -> Size:
    """The size as it reads back from text: equal sizes are equal, whatever was assumed about their dimensions. Raises FormatError."""
    return size if type(size) is int else parse_size(_size_text(size))


@lru_cache(maxsize=4096)
def parse_size(text: str) -> Size:
    """The size that a text says. Raises FormatError saying what was expected."""
    if text.isdecimal() and len(text) <= _MAX_DIGITS:
        return int(text)
    expression = _Parser(text).parse()
    if expression.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
        raise FormatError(f"expected a finite size, got {text!r}")
    return int(expression) if expression.is_Integer else expression


@lru_cache(maxsize=4096)
def _size_text(size: Size) -> str:
    if not isinstance(size, (int, sympy.Expr)):
        raise FormatError(f"expected a size, an integer or a sympy expression, got a {type(size).__name__}")
    again = parse_size(str(size))
    if not _dimensions(again) <= _dimensions(size):  # such as "oo" and "pi", which read like dimensions
        raise FormatError(f"expected a size over dimensions, got {size}")
    return str(again)


def _dimensions(size: Size) -> set[str]:
    return set() if isinstance(size, int) else {str(symbol) for symbol in size.free_symbols}


class _Parser:
    """A recursive descent over one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        matches = list(_TOKEN.finditer(text.rstrip()))
        unknown = next((match[2] for match in matches if match[2]), None)
        if unknown is not None or not matches:
            raise self._error("a size", unknown or "nothing")
        if len(matches) > _MAX_TOKENS:
            raise FormatError(f"expected a size of at most {_MAX_TOKENS} symbols, got {len(matches)}")
        self._tokens = [match[1] for match in matches] + [""]
        self._at = self._depth = 0

    def parse(self) -> Any:
        result = self._sum()
        if self._token:
            raise self._error("the end", self._token)
        return result

    @property
    def _token(self) -> str:
        return self._tokens[self._at]

    def _sum(self) -> Any:
        result = self._product()
        while self._token in ("+", "-"):
            sign = self._next()
            result = result + self._product() if sign == "+" else result - self._product()
        return result

    def _product(self) -> Any:
        result = self._factor()
        while self._token in _PRODUCTS:
            sign = self._next()
            other = self._factor()
            if sign != "*" and other == 0:
                raise self._error("a divisor other than 0", "0")
            result = self._bounded(_PRODUCTS[sign](result, other))
        return result

    def _factor(self) -> Any:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise FormatError(f"expected a size nested at most {_MAX_DEPTH} deep, got {self._text[:80]!r}")
        if self._accept("-"):
            result = -self._factor()
        else:
            result = self._atom()
            result = self._power(result, self._factor()) if self._accept("**") else result
        self._depth -= 1
        return result

    def _atom(self) -> Any:
        token = self._next()
        if token == "(":
            result = self._sum()
            self._expect(")")
            return result
        if token.isdecimal() and len(token) <= _MAX_DIGITS:
            return sympy.Integer(token)
        if not token.isidentifier():
            raise self._error(f"a dimension or an integer of at most {_MAX_DIGITS} digits", token or "the end")
        return self._call(token) if self._token == "(" else sympy.Symbol(token, integer=True, nonnegative=True)

    def _call(self, name: str) -> Any:
        if name not in _FUNCTIONS:
            raise self._error(f"one of the functions {', '.join(_FUNCTIONS)}", name)
        self._expect("(")
        args = [self._sum()]
        while self._accept(","):
            args.append(self._sum())
        self._expect(")")
        if len(args) != _ARITIES.get(name, len(args)):
            raise self._error(f"{_ARITIES[name]} arguments of {name}", str(len(args)))
        if name == "Mod" and args[1] == 0:
            raise self._error("a divisor other than 0", "0")
        return _FUNCTIONS[name](*args)

    def _power(self, base: Any, exponent: Any) -> Any:
        if not exponent.is_Integer or abs(int(exponent)) > _MAX_POWER or (base == 0 and exponent < 0):
            raise self._error(f"a power that is an integer of at most {_MAX_POWER}", str(exponent))
        if _bits(base) * abs(int(exponent)) > _MAX_BITS:
            raise self._error(f"numbers of at most {_MAX_BITS} bits", f"({base})**{exponent}")
        return base**exponent

    def _bounded(self, result: Any) -> Any:
        if _bits(result) > _MAX_BITS:
            raise self._error(f"numbers of at most {_MAX_BITS} bits", "more")
        return result

    def _next(self) -> str:
        token = self._token
        self._at += bool(token)
        return token

    def _accept(self, token: str) -> bool:
        return self._token == token and bool(self._next())

    def _expect(self, token: str) -> None:
        if not self._accept(token):
            raise self._error(repr(token), self._token or "the end")

    def _error(self, expected: str, got: str) -> FormatError:
        return FormatError(f"size {self._text[:80]!r}: expected {expected}, got {got[:80]}")


_PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {"*": operator.mul, "/": operator.truediv, "//": operator.floordiv}


def _bits(expression: Any) -> int:
    """The length of the largest number within an expression."""
    return max((max(abs(int(number.p)), int(number.q)).bit_length() for number in expression.atoms(sympy.Rational)), default=0)
