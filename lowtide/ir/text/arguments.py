"""Arguments of operators as text and back, every one exactly.

    argument = VALUE | "None" | "True" | "False" | INTEGER | FLOAT | STRING | tuple | call
    tuple    = "()" | "(" argument "," ")" | "(" argument ("," argument)+ ")"
    call     = "float(" STRING ")"                       the floats that have no digits: inf, -inf, nan
             | "complex(" argument "," argument ")"
             | "size(" STRING ")"                        a size that is no number, as in `size_text`
             | ATOM "(" STRING ")"                       dtype("float32"), device("cuda:0")

Strings are those of JSON. A text is only ever taken apart by this grammar, never executed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Mapping
from functools import lru_cache

import sympy

from lowtide.errors import FormatError
from lowtide.ir.graph import Arg, Atom, Value
from lowtide.ir.text.sizes import canonical, parse_size, size_text

NAME = r"[^\W\d]\w*"  # of values, storages and parameters
RESERVED = frozenset({"None", "True", "False", "_"})  # no names of values: each means something else where a value may stand

_MAX_DEPTH = 50  # of nested tuples
_ATOMS = ("dtype", "device", "layout", "memory_format")
_CALLS = ("float", "complex", "size", *_ATOMS)
_CONSTANTS: dict[str, Arg] = {"None": None, "True": True, "False": False}
_WORDS = {True: "True", False: "False", None: "None"}
_IS_NAME, _IS_NUMBER, _IS_STRING, _IS_INTEGERS, _IS_MARK = 1, 2, 3, 4, 5  # the groups of the next
_TOKEN = re.compile(rf'[ ]*(?:({NAME})|(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)|("(?:[^"\\]|\\.)*")|(\(-?\d+(?:,|(?:, -?\d+)+)\))|([(),=]))')


def argument_text(arg: Arg, known: Container[Value]) -> str:
    """An argument as text. Raises FormatError for a value that is not `known`, and for what a graph cannot hold."""
    try:
        return _text(arg, known, 0)
    except FormatError:
        raise
    except ValueError as error:  # Python's own limit to the length of an integer
        raise FormatError(f"expected an argument that can be written out: {error}") from error


def _text(arg: Arg, known: Container[Value], depth: int) -> str:
    if type(arg) is int:
        return str(arg)
    if isinstance(arg, Value):
        if arg not in known:
            raise FormatError(f"value {arg.name} is read before anything makes it: expected nodes in program order")
        return arg.name
    if isinstance(arg, tuple):
        return _tuple_text(arg, known, depth + 1)
    if arg is None or isinstance(arg, bool):
        return _WORDS[arg]
    if isinstance(arg, str):
        return json.dumps(arg)
    if isinstance(arg, Atom):
        return _atom_text(arg)
    if isinstance(arg, sympy.Expr):
        size = canonical(arg)
        return str(size) if isinstance(size, int) else f'size("{size_text(size)}")'
    return _number_text(arg)


def _tuple_text(items: tuple[Arg, ...], known: Container[Value], depth: int) -> str:
    if depth > _MAX_DEPTH:
        raise FormatError(f"expected an argument nested at most {_MAX_DEPTH} deep, got a deeper one")
    texts = [_text(item, known, depth) for item in items]
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


def _atom_text(atom: Atom) -> str:
    if atom.kind not in _ATOMS:
        raise FormatError(f"expected an Atom of kind {', '.join(_ATOMS)}, got {atom.kind!r}")
    return f"{atom.kind}({json.dumps(atom.name)})"


def _number_text(number: object) -> str:
    if isinstance(number, complex):
        return f"complex({_float_text(number.real)}, {_float_text(number.imag)})"
    if isinstance(number, float):
        return _float_text(number)
    if isinstance(number, int):
        return int.__repr__(number)
    raise FormatError(f"expected an argument that a graph can hold, got a {type(number).__name__}")


def _float_text(number: float) -> str:
    text = float.__repr__(number)
    return text if math.isfinite(number) else f'float("{text}")'


@lru_cache(maxsize=65536)
def _integers(text: str) -> tuple[int, ...]:
    """A tuple of integers, by far the most frequent one."""
    try:
        return tuple(int(digits) for digits in text[1:-1].split(",") if digits)
    except ValueError as error:  # Python's own limit to the length of an integer
        raise FormatError(f"expected integers that Python can read: {error}") from error


class ArgumentReader:
    """Takes arguments off a line of text, from `at` on. `at` is where the reader stands."""

    def __init__(self, line: str, at: int, values: Mapping[str, Value]) -> None:
        self._line, self._values = line, values
        self._start = self._end = at
        self._kind, self._token = 0, ""
        self._advance()

    @property
    def at(self) -> int:
        """Where the token that comes next starts in the line."""
        return self._start

    def call(self) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
        """What stands between the parentheses of a call, and the closing one: positional arguments, then those by keyword."""
        args: list[Arg] = []
        kwargs: list[tuple[str, Arg]] = []
        while not self._accept(")"):
            if args or kwargs:
                self._expect(",")
            if self._kind == _IS_NAME and self._line[self._end : self._end + 1] == "=":
                kwargs.append((self._keyword(), self._argument(0)))
            elif kwargs:
                raise self._error("an argument by keyword, as the one before it")
            else:
                args.append(self._argument(0))
        return tuple(args), tuple(kwargs)

    def values(self) -> tuple[Value, ...]:
        """What stands between the parentheses of a `return`, and the closing one: values alone."""
        items = self._tuple(0)
        values = tuple(item for item in items if isinstance(item, Value))
        if len(values) < len(items):
            raise FormatError("expected only values to be returned, got a literal")
        return values

    def _keyword(self) -> str:
        name = self._next()
        self._expect("=")
        return name

    def _argument(self, depth: int) -> Arg:
        if self._kind == _IS_NAME:
            return self._named()
        if self._kind == _IS_NUMBER:
            return self._number()
        if self._kind == _IS_STRING:
            return self._string()
        if self._kind == _IS_INTEGERS:
            return _integers(self._next())
        if self._accept("("):
            return self._tuple(depth + 1)
        raise self._error("an argument")

    def _named(self) -> Arg:
        if self._token in _CALLS and self._line[self._end : self._end + 1] == "(":
            return self._called(self._next())
        if self._token in _CONSTANTS:
            return _CONSTANTS[self._next()]
        value = self._values.get(self._token)
        if value is None:
            raise self._error("the name of a value made above")
        self._advance()
        return value

    def _called(self, name: str) -> Arg:
        self._expect("(")
        result: Arg
        if name == "float":
            result = self._special_float()
        elif name == "complex":
            real = self._piece()
            self._expect(",")
            result = complex(real, self._piece())
        else:
            result = parse_size(self._string()) if name == "size" else Atom(name, self._string())
        self._expect(")")
        return result

    def _piece(self) -> float:
        """One of the two floats of a complex number."""
        if self._kind == _IS_NAME and self._token == "float":
            self._advance()
            self._expect("(")
            number = self._special_float()
            self._expect(")")
            return number
        if self._kind != _IS_NUMBER:
            raise self._error("a float")
        return float(self._number())

    def _special_float(self) -> float:
        if self._token not in ('"inf"', '"-inf"', '"nan"'):
            raise self._error('"inf", "-inf" or "nan"')
        return float(self._string())

    def _tuple(self, depth: int) -> tuple[Arg, ...]:
        if depth > _MAX_DEPTH:
            raise self._error(f"an argument nested at most {_MAX_DEPTH} deep")
        items: list[Arg] = []
        while not self._accept(")"):
            items.append(self._argument(depth))
            if len(items) == 1 or self._token != ")":
                self._expect(",")
        return tuple(items)

    def _number(self) -> int | float:
        try:
            number = float(self._token) if "." in self._token or "e" in self._token else int(self._token)
        except ValueError as error:  # Python's own limit to the length of an integer
            raise self._error("an integer that Python can read") from error
        self._advance()
        return number

    def _string(self) -> str:
        if self._kind != _IS_STRING:
            raise self._error("a string in double quotes")
        try:
            text: str = json.loads(self._token)
        except ValueError as error:
            raise self._error("a string as JSON writes it") from error
        self._advance()
        return text

    def _advance(self) -> None:
        match = _TOKEN.match(self._line, self._end)
        if match is None:
            self._start, self._kind, self._token = self._end, 0, ""
            return
        self._kind = match.lastindex or 0
        self._start, self._end, self._token = match.start(self._kind), match.end(), match[self._kind]

    def _next(self) -> str:
        token = self._token
        self._advance()
        return token

    def _accept(self, mark: str) -> bool:
        if self._kind != _IS_MARK or self._token != mark:
            return False
        self._advance()
        return True

    def _expect(self, mark: str) -> None:
        if not self._accept(mark):
            raise self._error(repr(mark))

    def _error(self, expected: str) -> FormatError:
        return FormatError(f"expected {expected}, got {self._line[self._start : self._start + 40] or 'the end of the line'!r}")
