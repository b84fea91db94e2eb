"""What containers hold: looked at, compared, put back. Methods of classes of their own are not asked."""

from __future__ import annotations

import collections
import enum
import io
import operator
import sys
from typing import Any

CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum)


def pieces(item: Any) -> dict[Any, Any]:
    """What a container holds, by key or position; of a set each piece by itself."""
    if isinstance(item, dict):
        return dict(dict.items(item))
    base = next(each for each in CONTAINERS if isinstance(item, each))
    items = list(base.__iter__(item))
    return dict(zip(items, items, strict=True)) if isinstance(item, (set, frozenset)) else dict(enumerate(items))


def put_back(container: Any, before: dict[Any, Any]) -> None:
    """Put back what it held, where that is not what it holds. An OrderedDict keeps its order beside the table."""
    now, is_table = pieces(container), isinstance(container, dict)
    as_before = len(now) == len(before) and all(map(operator.is_, now.values(), before.values()))
    if as_before and (not is_table or all(map(operator.is_, now, before))):
        return
    if is_table:
        base: Any = collections.OrderedDict if isinstance(container, collections.OrderedDict) else dict
        base.clear(container)
        for key, item in before.items():
            base.__setitem__(container, key, item)
        return
    base = next(each for each in CONTAINERS if isinstance(container, each))
    base.clear(container)
    (base.update if base is set else base.extend)(container, before.values())


def is_plain(item: Any) -> bool:
    """Whether it is a number or a text, and none that a program computes, whose classes are derived from those."""
    return type(item) in PLAIN or isinstance(item, enum.Enum)


def are_plain(items: Any) -> bool:
    """Whether a container, or a dictionary's values, are numbers and texts alone."""
    return all(isinstance(piece, PLAIN) for piece in (items.values() if isinstance(items, dict) else items))


def differ(old: Any, new: Any) -> bool:
    """Whether two numbers or texts do; nan is like itself."""
    if old is new or not (isinstance(old, PLAIN) and isinstance(new, PLAIN)):
        return False
    return type(old) is not type(new) or not (old == new or (old != old and new != new))


def position(file: io.IOBase) -> int:
    """Where a file is read or written next; -1 where it has no such place, as a console has not."""
    try:
        return -1 if file in (sys.stdout, sys.stderr) or file.closed or file.isatty() else file.tell()
    except (OSError, ValueError):
        return -1
