"""Files as JSON: a text parsed, its fields, each of the type that it should have, or a FormatError that says where it is not."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING
from functools import cache
from types import NoneType
from typing import Any, NoReturn, TypeGuard, TypeVar, get_args, get_origin, get_type_hints

from lowtide.errors import FormatError

R = TypeVar("R")
SEAL = "checksum"  # the field of an object that holds its checksum


class Repeating(dict[str, Any]):
    """An object of which two fields were named alike; `check_fields` refuses it, where its place in the file is known."""

    complaint: str


def parsed(where: str, text: str | bytes, **options: Any) -> Any:
    """What a text holds. Raises FormatError for one cut short, no JSON, nested or numbered beyond reason, or with a field twice."""
    try:
        return json.loads(text, object_pairs_hook=without_repeats, **options)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: expected a whole JSON text: {error}") from error


def checksum(item: dict[str, Any]) -> str:
    """Of an object's fields in whatever order, but for the one that holds it."""
    sealed = {name: entry for name, entry in item.items() if name != SEAL}
    return hashlib.sha256(json.dumps(sealed, sort_keys=True).encode()).hexdigest()


def check_fields(where: str, item: Any, known: set[str]) -> None:
    """`item` is an object and has no field but `known` ones: a field that nobody reads is most likely misspelt."""
    if not isinstance(item, dict):
        raise FormatError(f"{where}: expected an object, got {type(item).__name__}")
    if isinstance(item, Repeating):
        raise FormatError(f"{where}: {item.complaint}")
    unknown = item.keys() - known
    if unknown:
        raise FormatError(f"{where}: expected fields among {', '.join(sorted(known))}, got {min(unknown)!r}")


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's fields, for `json.loads(object_pairs_hook=)`; JSON itself silently keeps the last of two that are named alike."""
    fields = marking_repeats(pairs)
    if isinstance(fields, Repeating):
        raise FormatError(fields.complaint)
    return fields


def marking_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The same for files whose every object goes through `check_fields`: which can say where the object is."""
    fields = dict(pairs)
    return fields if len(fields) == len(pairs) else _repeating([name for name, _ in pairs])


def _repeating(names: list[str]) -> Repeating:
    twice = next(name for name, count in Counter(names).items() if count > 1)
    marked = Repeating()
    marked.complaint = f"expected each field of an object once, got {twice!r} twice in {{{', '.join(map(repr, names[:6]))}}}"
    return marked


def integer(where: str, item: dict[str, Any], field: str, default: int | None = None) -> int:
    """A field that is a whole number; it may be left out only where there is a default."""
    value = item.get(field, default)
    return value if _is_integer(value) else refuse(where, field, "an integer", value)


def count(where: str, item: dict[str, Any], field: str, least: int = 0) -> int:
    value = integer(where, item, field)
    return value if value >= least else refuse(where, field, f"{least} or more", value)


def number(where: str, field: str, value: Any, least: float = 0.0) -> float:
    """What stands for a field, if it is a finite number from `least` on."""
    if not is_number(value) or not least <= value or not abs(value) <= sys.float_info.max:
        refuse(where, field, "a number" if math.isinf(least) else f"a number, {least:g} or more", value)
    return float(value)


def integers(where: str, item: dict[str, Any], field: str) -> tuple[int, ...]:
    """A field that is a list of whole numbers, empty where it is left out."""
    value = item.get(field, [])
    return tuple(value) if _is_integers(value) else refuse(where, field, "a list of integers", value)


def pairs(where: str, item: dict[str, Any], field: str) -> tuple[tuple[int, int], ...]:
    """A field that is a list of pairs of whole numbers, empty where it is left out."""
    value = item.get(field, [])
    if not isinstance(value, list) or not all(_is_integers(pair) and len(pair) == 2 for pair in value):
        refuse(where, field, "a list of pairs of integers", value)
    return tuple((first, second) for first, second in value)


def boolean(where: str, item: dict[str, Any], field: str) -> bool:
    """A field that is true or false, false where it is left out."""
    value = item.get(field, False)
    return value if isinstance(value, bool) else refuse(where, field, "true or false", value)


def string(where: str, item: dict[str, Any], field: str) -> str:
    value = item.get(field)
    return value if isinstance(value, str) else refuse(where, field, "a string", value)


def lines(where: str, item: dict[str, Any], field: str) -> list[str]:
    value = item.get(field)
    if not isinstance(value, list) or not all(isinstance(line, str) and "\n" not in line for line in value):
        refuse(where, field, "a list of lines of text", value)
    return value


@cache
def _annotated(kind: type[Any]) -> dict[str, tuple[Any, bool]]:
    """By field of a dataclass its type, and whether it may be left out."""
    types = get_type_hints(kind)
    return {each.name: (types[each.name], each.default is not MISSING) for each in dataclasses.fields(kind)}


def record(where: str, item: Any, kind: type[R], **least: float) -> R:
    """The dataclass that an object tells, each field of the type that it is annotated with; what has a default may be left out.

    Numbers are 0 or more, or what `least` says of their field, also in dataclasses within this one.
    """
    known = _annotated(kind)  # type: ignore[arg-type]  # classes have a hash
    check_fields(where, item, set(known))
    read = {
        name: _of_type(where, name, item.get(name), wanted, least)
        for name, (wanted, may_lack) in known.items()
        if name in item or not may_lack
    }
    return kind(**read)


def _of_type(where: str, name: str, value: Any, wanted: Any, least: Mapping[str, float]) -> Any:
    parts = get_args(wanted)
    if NoneType in parts:
        return None if value is None else _of_type(where, name, value, parts[0], least)
    if get_origin(wanted) is tuple:
        if not isinstance(value, list) or (... not in parts and len(value) != len(parts)):
            refuse(where, name, "a list" if ... in parts else f"a list of {len(parts)}", value)
        return tuple(_of_type(where, name, each, parts[0 if ... in parts else at], least) for at, each in enumerate(value))
    if dataclasses.is_dataclass(wanted):
        return record(where, value, wanted, **least)  # type: ignore[arg-type]  # a class, as nothing else is annotated with
    lowest = least.get(name, 0)
    if wanted is float:
        number(where, name, value, lowest)
        return value
    if wanted is int and _is_integer(value) and not lowest <= value < 2**62:
        refuse(where, name, f"from {lowest} to below 2**62", value)
    expected = {int: "an integer", str: "a string", bool: "true or false"}[wanted]
    return value if type(value) is wanted else refuse(where, name, expected, value)


def refuse(where: str, field: str, expected: str, value: Any) -> NoReturn:
    """Raises FormatError: the field is not what it should be."""
    kind = "nothing" if value is None else type(value).__name__
    raise FormatError(f"{where}: expected {field!r} to be {expected}, got {kind}")


def is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_integers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(_is_integer(item) for item in value)
