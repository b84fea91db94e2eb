"""What containers hold: looked at, compared, put back. Methods of classes of their own are not asked."""

from __future__ import annotations

import array
import collections
import enum
import io
import itertools
import operator
import pickle
import random
import sys
from typing import Any

import numpy
import numpy.random

CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
DRAWN = (random.Random, numpy.random.Generator, numpy.random.RandomState)
MOVING = (*DRAWN, io.IOBase, array.array, bytearray, itertools.count)
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


def differ(old: Any, new: Any) -> bool:
    """Whether two numbers or texts do; nan is like itself."""
    if old is new or not (isinstance(old, PLAIN) and isinstance(new, PLAIN)):
        return False
    return type(old) is not type(new) or not (old == new or (old != old and new != new))


def position(item: Any) -> Any:
    """Where a file is read or written, what a generator of random numbers or a counter gives next; None where nothing says so."""
    try:
        if isinstance(item, io.IOBase):
            return None if item in (sys.stdout, sys.stderr) or item.closed or item.isatty() else item.tell()
        if isinstance(item, random.Random):
            return item.getstate()
        if isinstance(item, (numpy.random.Generator, numpy.random.RandomState)):
            return pickle.dumps(_bits(item).state)
        if isinstance(item, (array.array, bytearray)):
            return bytes(item)
        return repr(item) if type(item) is itertools.count else None
    except (OSError, ValueError, NotImplementedError):  # NotImplementedError: of `random.SystemRandom`
        return None


def turn_back(item: Any, where: Any) -> None:
    """Have a generator of random numbers, or an array, go on from there; a file and a counter cannot."""
    if isinstance(item, random.Random):
        item.setstate(where)
    elif isinstance(item, (numpy.random.Generator, numpy.random.RandomState)):
        _bits(item).state = pickle.loads(where)
    elif isinstance(item, (array.array, bytearray)):
        item[:] = array.array(item.typecode, where) if isinstance(item, array.array) else where


def _bits(item: Any) -> Any:
    return item.bit_generator if isinstance(item, numpy.random.Generator) else item._bit_generator
