"""Arguments of operators and what values are, as text and back, every one exactly.

    argument = VALUE | "None" | "True" | "False" | INTEGER | FLOAT | STRING | tuple | call
    tuple    = "()" | "(" argument "," ")" | "(" argument ("," argument)+ ")"
    call     = "float(" STRING ")"                       the floats that have no digits: inf, -inf, nan
             | "complex(" argument "," argument ")"
             | "size(" STRING ")"                        a size that is no number, as in `size_text`
             | ATOM "(" STRING ")"                       dtype("float32"), device("cuda:0")

Strings are those of JSON. A text is only ever taken apart by this grammar, never executed. A value is its layout, then its storage:

    float32[3, 2] strides[1, 3] offset[1] version[1] on w          on a storage that is known already
    float32[1, 64, 112, 112] 3.06 MiB activation cpu               on a new storage, named as the value
    uint8[9] 2.00 KiB = 2048 B activation cuda:0 in block          on a new storage of another name, with its exact bytes

Strides are left out where they are a contiguous tensor's, offset (in elements) and version where they are 0, and exact bytes where they
are those of a dense tensor of that shape. Bytes shown for people must agree with the exact ones.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Mapping
from functools import lru_cache

import sympy

from lowtide.errors import FormatError
from lowtide.ir.graph import Arg, Atom, Kind, Storage, Value
from lowtide.ir.sizes import ITEM_BYTES, Size, contiguous_stride, product
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
_DEVICE = r"\w+(?::\d{1,9})?"
_CLAUSE = re.compile(
    r"(?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?: strides\[(?P<stride>[^\]]*)\])?(?: offset\[(?P<offset>[^\]]*)\])?"
    rf"(?: version\[(?P<version>-?\d{{1,18}})\])? (?:on (?P<known>{NAME})"
    rf"|(?P<bytes>(?P<amount>.+?) (?P<unit>[KMG]i)?B(?: = (?P<exact>\d{{1,40}}) B)?) (?P<kind>\w+)"
    rf" (?P<device>{_DEVICE})(?: in (?P<name>{NAME}))?)"
)
_UNITS = (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10))


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


def layout_text(value: Value) -> str:
    """Dtype, shape, and what is not implied of strides, offset and version."""
    return _layout_text(value.dtype, value.shape, value.stride, value.offset, value.version)


def storage_text(value: Value) -> str:
    """Bytes, kind and device of the value's storage, and its name where it is another than the value's."""
    storage = value.storage
    text = _storage_text(storage.nbytes, _dense_bytes(value.dtype, value.shape), storage.kind, storage.device)
    return text if storage.name == value.name else f"{text} in {checked_name(storage.name)}"


def parse_value(name: str, clause: str, storages: dict[str, Storage]) -> Value:
    """The value of that name that a clause describes; a new storage is added to `storages`. Raises FormatError saying what was expected."""
    match = _CLAUSE.fullmatch(clause)
    if match is None:
        raise FormatError(f"expected what {name} is, such as 'float32[3] 12 B activation cpu' or 'float32[3] on x', got {clause[:200]!r}")
    dtype, shape, stride, offset = match["dtype"], _parse_sizes(match["shape"]), match["stride"], match["offset"]
    return Value(
        name,
        _known_storage(match["known"], storages) if match["known"] else _new_storage(name, match, dtype, shape, storages),
        dtype,
        shape,
        contiguous_stride(shape) if stride is None else _parse_sizes(stride),
        0 if offset is None else parse_size(offset),
        int(match["version"] or 0),
    )


def checked_name(name: str) -> str:
    """A name that text can hold. Raises FormatError for any other."""
    if not _NAME.fullmatch(name):
        raise FormatError(f"expected an identifier as the name of a value or storage, got {name!r}")
    return name


_NAME = re.compile(NAME)


@lru_cache(maxsize=65536)
def _layout_text(dtype: str, shape: tuple[Size, ...], stride: tuple[Size, ...], offset: Size, version: int) -> str:
    if not re.fullmatch(r"\w+", dtype):
        raise FormatError(f"expected the name of a dtype such as 'float32', got {dtype!r}")
    shape, stride = tuple(map(canonical, shape)), tuple(map(canonical, stride))
    text = f"{dtype}[{_sizes_text(shape)}]"
    if stride != contiguous_stride(shape):
        text += f" strides[{_sizes_text(stride)}]"
    if canonical(offset) != 0:
        text += f" offset[{size_text(offset)}]"
    return f"{text} version[{version}]" if version != 0 else text


@lru_cache(maxsize=65536)
def _storage_text(nbytes: Size, dense_bytes: Size | None, kind: Kind, device: str) -> str:
    if not re.fullmatch(_DEVICE, device):
        raise FormatError(f"expected a device such as 'cpu' or 'cuda:0', got {device!r}")
    return f"{_bytes_text(nbytes, dense_bytes)} {kind.value} {device}"


def _bytes_text(nbytes: Size, dense_bytes: Size | None) -> str:
    """Bytes for people, and exactly where that is not enough to know them."""
    nbytes = canonical(nbytes)
    if not isinstance(nbytes, int) or nbytes < 1024:
        return f"{size_text(nbytes)} B"
    unit, size = next((unit, size) for unit, size in _UNITS if nbytes >= size)
    exactly = "" if nbytes == dense_bytes else f" = {size_text(nbytes)} B"
    return f"{nbytes / size:.2f} {unit}B{exactly}"


def _dense_bytes(dtype: str, shape: tuple[Size, ...]) -> Size | None:
    """The bytes of a tensor without gaps, None for a dtype of unknown size."""
    return product(shape) * ITEM_BYTES[dtype] if dtype in ITEM_BYTES else None


def _known_storage(name: str, storages: dict[str, Storage]) -> Storage:
    if name not in storages:
        raise FormatError(f"expected the name of a storage introduced above, got {name!r}")
    return storages[name]


def _new_storage(value_name: str, match: re.Match[str], dtype: str, shape: tuple[Size, ...], storages: dict[str, Storage]) -> Storage:
    name = match["name"] or value_name
    if name in storages:
        raise FormatError(f"expected a new storage, got {name!r} for the second time: write 'on {name}' for another value on it")
    storages[name] = Storage(name, _parse_bytes(match, _dense_bytes(dtype, shape)), match["device"], _parse_kind(match["kind"]))
    return storages[name]


def _parse_bytes(match: re.Match[str], dense_bytes: Size | None) -> Size:
    nbytes = dense_bytes
    if match["exact"] is not None:
        nbytes = int(match["exact"])
    elif match["unit"] is None:
        nbytes = parse_size(match["amount"])
    if nbytes is None or _bytes_text(nbytes, dense_bytes) != match["bytes"]:
        expected = "the exact bytes" if nbytes is None else repr(_bytes_text(nbytes, dense_bytes))
        raise FormatError(f"expected {expected}, got {match['bytes']!r}: bytes for people and exact bytes must agree")
    return nbytes


def _parse_kind(text: str) -> Kind:
    try:
        return Kind(text)
    except ValueError as error:
        raise FormatError(f"expected a kind of storage, one of {', '.join(kind.value for kind in Kind)}; got {text!r}") from error


def _sizes_text(sizes: tuple[Size, ...]) -> str:
    return ", ".join(map(size_text, sizes))


@lru_cache(maxsize=65536)
def _parse_sizes(text: str) -> tuple[Size, ...]:
    """Sizes between commas, less those within parentheses, which belong to functions."""
    if not text:
        return ()
    pieces, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            pieces.append(text[start:at])
            start = at + 1
    return tuple(map(parse_size, [*pieces, text[start:]]))
