"""What containers hold, and attributes of the user's classes: looked at, compared, put back. Methods of classes of their own are not asked.

And what a program reaches that goes on by itself where it is used: iterators, generators of random numbers, files, queues, arrays.
"""

from __future__ import annotations

import array
import collections
import contextvars
import datetime
import decimal
import enum
import fractions
import functools
import io
import mmap
import operator
import pathlib
import pickle
import queue
import random
import sys
import threading
import types
import warnings
import weakref
import zlib
from collections.abc import Container, Iterator
from contextlib import suppress
from typing import Any

import numpy
import numpy.random
import torch

from lowtide.base.places import ABSENT, Position, attributes, is_slot, put_entry, static_attribute
from lowtide.capture.care.writes import refuse
from lowtide.capture.effects.stand_ins import is_stand_in
from lowtide.capture.results import holds_fakes, is_number
from lowtide.capture.sources import is_written_by_user, users_line
from lowtide.errors import CaptureError

CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
DRAWN = (random.Random, numpy.random.Generator, numpy.random.RandomState)
ARRAYS = (array.array, bytearray, numpy.ndarray, memoryview, mmap.mmap)
MOVING = (*DRAWN, *ARRAYS, io.IOBase, contextvars.ContextVar, queue.Queue, queue.SimpleQueue)
SPACES = (types.SimpleNamespace, threading.local)  # of which no class notes what is read
_CALLING, _REDUCE = type(iter(int, 1)), vars(object)["__reduce__"]
_OWN = __name__.rpartition(".care")[0]  # which puts functions of its own in the places of others
_LARGEST = 1000  # items of a container that is made again
_FIXED = (
    torch.dtype, torch.device, torch.layout, torch.memory_format, numpy.generic, numpy.dtype, type, range, slice, pathlib.PurePath,
    fractions.Fraction, decimal.Decimal, datetime.date, datetime.time, datetime.timedelta,
)  # fmt: skip
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


def in_words(item: Any) -> str:
    return repr(item) if is_plain(item) else f"a {type(item).__name__}"


def is_constant(item: Any) -> bool:
    """Whether it is plain or fixed, or a small container of such, of no class of the user's but for tuples: one like it can be made."""
    if issubclass(type(item), numpy.ndarray):  # `isinstance` is told so by what stands for an array that each step draws
        return bool(item.dtype != object)
    if not isinstance(item, tuple) and type(item) not in (list, dict, set, frozenset):
        return is_plain(item) or isinstance(item, _FIXED)
    return len(item) < _LARGEST and all(map(is_constant, (*item, *item.values()) if type(item) is dict else item))


def is_put(item: Any) -> bool:
    """Whether each step can put it where it lies: a program has not computed it, and no capture has made it."""
    if item is ABSENT or is_constant(item):
        return item is not ABSENT
    if isinstance(item, list) and any(map(_refers_to_tensor, item)):
        return False  # as torch's RNNs keep them of their weights: a step's are those that lie there
    function = item.func if isinstance(item, functools.partial) else item
    stands_in = isinstance(function, types.FunctionType) and (function.__module__ or "").startswith(_OWN)
    return not (stands_in or is_number(item)) and (is_stand_in(item) or not holds_fakes(item))


def _refers_to_tensor(item: Any) -> bool:
    """Whether it is a weak reference to a tensor, or to one that was."""
    return type(item) is weakref.ref and (item() is None or isinstance(item(), torch.Tensor))


def differ(old: Any, new: Any) -> bool:
    """Whether two numbers or texts do; nan is like itself."""
    if old is new or not (isinstance(old, PLAIN) and isinstance(new, PLAIN)):
        return False
    return type(old) is not type(new) or not (old == new or (old != old and new != new))


def moves(item: Any) -> bool:
    """Whether it goes on by itself where it is used: an iterator of Python's own, a generator of random numbers, a file, an array."""
    return isinstance(item, MOVING) or is_iterator(item) or _is_of_database(item)


def is_iterator(item: Any) -> bool:
    """Whether it is one of Python's own or of another language's, and no file."""
    return type(getattr(type(item), "__next__", None)) is types.WrapperDescriptorType and not isinstance(item, MOVING)


def is_opaque(item: Any) -> bool:
    """Whether it is an iterator of which nothing says where it is: `re.finditer`, `iter(function, last)`, a cursor of a database."""
    if not is_iterator(item) or isinstance(item, types.GeneratorType):
        return False
    return type(item) is _CALLING or (type(item).__reduce__ is _REDUCE and not hasattr(item, "__length_hint__"))


def checksum(item: Any) -> int | None:
    """Of a large array, of which nobody keeps a copy; None of one that lies on a disk, or apart."""
    plain = isinstance(item, numpy.ndarray) and item.flags.c_contiguous and not item.dtype.hasobject
    return zlib.crc32(item.reshape(-1).view(numpy.uint8)) if plain and not isinstance(item, numpy.memmap) else None


def stays(item: Any, where: Any) -> bool:
    """Whether what was done to it cannot be undone."""
    if isinstance(item, numpy.ndarray):
        return isinstance(where, int)
    return isinstance(item, (io.IOBase, queue.Queue, queue.SimpleQueue)) or _is_of_database(item)


def _is_of_database(item: Any) -> bool:
    return type(item).__module__ == "sqlite3" and hasattr(type(item), "total_changes")


def position(item: Any) -> Any:
    """Where a file is read or written, what a generator of random numbers or an iterator gives next; None where nothing says so."""
    try:
        if isinstance(item, io.IOBase):
            return None if item in (sys.stdout, sys.stderr) or item.closed or item.isatty() else item.tell()
        if isinstance(item, random.Random):
            return item.getstate()
        if isinstance(item, (numpy.random.Generator, numpy.random.RandomState)):
            return pickle.dumps(_bits(item).state)
        if isinstance(item, numpy.ndarray):
            return item.tobytes() if not item.dtype.hasobject else item.ravel().tolist() if item.dtype == object else None
        if isinstance(item, ARRAYS):
            return item[:] if isinstance(item, mmap.mmap) else bytes(item)
        if isinstance(item, (queue.Queue, queue.SimpleQueue)):
            return item.qsize()
        if _is_of_database(item):
            return item.total_changes, item.in_transaction
        if isinstance(item, contextvars.ContextVar):
            return [item.get(ABSENT)]
        return _next_of(item)
    except (OSError, ValueError, NotImplementedError):  # NotImplementedError: of `random.SystemRandom`
        return None


def _next_of(item: Any) -> Any:
    """What an iterator rests on, but for other iterators."""
    if isinstance(item, types.GeneratorType):
        return None if item.gi_frame is None or item.gi_running else [item.gi_frame.f_lasti, *item.gi_frame.f_locals.values()]
    with suppress(AttributeError, TypeError):
        return type(item).__length_hint__(item)
    with suppress(Exception), warnings.catch_warnings():  # of whatever kind an iterator raises that cannot be copied
        warnings.simplefilter("ignore", DeprecationWarning)
        return [*_plain_within(item.__reduce__())]


def _plain_within(item: Any) -> Iterator[Any]:
    for piece in item if isinstance(item, tuple) else ():
        yield from _plain_within(piece) if isinstance(piece, tuple) else (piece,) if is_plain(piece) else ()


def is_moved(item: Any, where: Any) -> bool:
    """Whether it is no more where it was. Objects that it holds are compared by identity."""
    now = checksum(item) if isinstance(item, numpy.ndarray) and isinstance(where, int) else position(item)
    if not isinstance(now, list) or not isinstance(where, list):
        return bool(now != where)
    return len(now) != len(where) or any(one is not two and not (is_plain(one) and one == two) for one, two in zip(now, where, strict=True))


def turn_back(item: Any, where: Any) -> None:
    """Have a generator of random numbers, or an array, go on from there; a file and an iterator cannot."""
    if isinstance(item, random.Random):
        item.setstate(where)
    elif isinstance(item, (numpy.random.Generator, numpy.random.RandomState)):
        _bits(item).state = pickle.loads(where)
    elif stays(item, where):
        return
    elif isinstance(item, numpy.ndarray):
        item.flat[:] = where if item.dtype == object else numpy.frombuffer(where, item.dtype)
    elif isinstance(item, memoryview):
        if not item.readonly:
            item.cast("B")[:] = where
    elif isinstance(item, ARRAYS):
        item[:] = array.array(item.typecode, where) if isinstance(item, array.array) else where


def _bits(item: Any) -> Any:
    return item.bit_generator if isinstance(item, numpy.random.Generator) else item._bit_generator


_MOST_BYTES, _MOST_SUMMED = 1 << 26, 1 << 28  # of arrays that are copied, and of those that are looked at


class MovingObjects:
    """Where each of them was when it was found."""

    def __init__(self) -> None:
        self._found: list[tuple[Any, Any]] = []
        self._bytes = 0  # of arrays among them
        self._arrays: list[numpy.ndarray[Any, Any]] = []

    def add(self, item: Any, led_by: object) -> None:
        """`led_by` is the place that led to it, None where none did. Raises CaptureError for one of which nothing says where it is."""
        if is_opaque(item):
            where = f"at {users_line()}" if led_by is None else f"by way of {led_by}".rstrip(",")
            refuse(
                CaptureError(
                    f"the program reaches a {type(item).__name__} {where}, which goes on each time it is used, and nothing says where it "
                    "is, so that no step could do the same: take its next item before the step and pass it with the batch"
                )
            )
        self._arrays += [item] if isinstance(item, numpy.ndarray) else []
        self._bytes += len(item) if isinstance(item, mmap.mmap) else int(getattr(item, "nbytes", 0)) if isinstance(item, ARRAYS) else 0
        state_of = position if self._bytes < _MOST_BYTES else checksum if self._bytes < _MOST_SUMMED else lambda _: None
        if moves(item) and (at := state_of(item)) is not None:
            self._found.append((item, at))

    def change(self) -> str:
        """What has moved, and what to do about it; "" where nothing has."""
        moved, at = next(((item, at) for item, at in self._found if is_moved(item, at)), (None, None))
        if moved is None:
            return ""
        what = "that it reaches has gone on, and Python cannot turn it back; take its next item before the step and pass it with the batch"
        if isinstance(moved, DRAWN):
            what = "is drawn from; draw with torch, or before the step and pass it with the batch"
        elif not is_iterator(moved):
            kept = "; what the capture has done to it stays" if stays(moved, at) else ""
            what = f"that it reaches is read or written{kept}; use it behind the step, with what the step returns"
        return f"a {type(moved).__name__} {what}"

    def turn_back(self) -> None:
        for item, at in self._found:
            if is_moved(item, at):
                turn_back(item, at)

    def lie_under(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the memory of an array among them."""
        start, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        bounds = ((each.__array_interface__["data"][0], each.nbytes) for each in self._arrays)
        return any(first < start + size and start < first + length for first, length in bounds)


class ClassNumbers:
    """What lay in attributes of classes when they were found."""

    def __init__(self) -> None:
        self._of: dict[type, dict[str, Any]] = {}
        self._all: dict[type, dict[str, Any]] = {}  # with what is no number

    def note(self, cls: type) -> None:
        if cls not in self._of:
            self._of[cls], self._all[cls] = _numbers_of(cls), dict(vars(cls))

    def clear(self) -> None:
        self._of.clear()
        self._all.clear()

    def replaced(self) -> Iterator[tuple[type, str, Any]]:
        """Where something else lies now that is no number, and what lay there."""
        for cls, before in self._all.items():
            changed = (name for name, now in vars(cls).items() if now is not before.get(name, ABSENT) and not is_plain(now))
            yield from ((cls, name, before.get(name, ABSENT)) for name in changed if not name.startswith("__"))

    def others(self, but: Container[tuple[int, str]]) -> Iterator[tuple[type, str, Any, Any]]:
        """Where another number lies now, what lay there, and what does; but for places, by class and name, that are noted otherwise."""
        for cls, before in self._of.items():
            for name, number in (before | dict.fromkeys(_numbers_of(cls).keys() - before.keys(), ABSENT)).items():
                now = vars(cls).get(name, ABSENT)
                if (id(cls), name) not in but and differ(number, now) and not is_number(now):
                    yield cls, name, number, now

    def unchanged(self, words: Container[str]) -> Iterator[tuple[type, str]]:
        """The attributes with these names that hold no number, or the same one."""
        for cls, before in self._of.items():
            for name, item in vars(cls).items():
                is_old = not is_plain(item) or (name in before and not differ(before[name], item))
                if is_old and name in words and not name.startswith("__"):
                    yield cls, name


def counts(old: Any, new: Any) -> bool:
    """Whether a number has become another, as counts do; a flag or a text may settle."""
    return {type(old), type(new)} <= {int, float}


def _numbers_of(cls: type) -> dict[str, Any]:
    """The numbers and texts in a class's own attributes, but for what Python keeps there."""
    return {name: item for name, item in vars(cls).items() if is_plain(item) and not name.startswith("__")}


class WrittenAttributes:
    """Attributes of objects that a program writes, and what lay there before."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], tuple[Any, Any]] = {}

    def __contains__(self, key: tuple[int, str]) -> bool:
        return key in self._before

    def note(self, item: Any, name: str) -> None:
        own = attributes(item)
        before = static_attribute(item, name) if own is ABSENT or is_slot(item, name) else own.get(name, ABSENT)
        self._before.setdefault((id(item), name), (item, before))

    def of_users(self) -> list[tuple[Any, str]]:
        return [(item, name) for (_, name), (item, _) in self._before.items() if is_written_by_user(type(item))]

    def deleted(self) -> str:
        """An attribute of an object of the user's that is gone, in words; "" where none is."""
        gone = (
            (item, name)
            for item, name in self.of_users()
            if self._before[id(item), name][1] is not ABSENT and static_attribute(item, name) is ABSENT
        )
        return next((f"attribute {name!r} of a {type(item).__name__} is deleted" for item, name in gone), "")

    def put_back(self, item: Any, name: str) -> None:
        own, (_, before) = attributes(item), self._before[id(item), name]
        if own is ABSENT or is_slot(item, name):
            Position.of(item, name).put(before)
        else:
            put_entry(own, name, before)

    def put_all_back(self) -> None:
        for (_, name), (item, _) in self._before.items():
            self.put_back(item, name)

    def clear(self) -> None:
        self._before.clear()


def is_replaced(old: Any, new: Any) -> bool:
    """Whether something else lies where one thing lay: another number, another object, but not what is fixed and the same."""
    if old is new or (is_plain(old) and is_plain(new)):
        return differ(old, new)
    return not (is_constant(old) and is_constant(new) and type(old) is type(new) and repr(old) == repr(new))


def difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The first name under which something else lies."""
    for name in {**before, **now}:
        old, new = before.get(name, ABSENT), now.get(name, ABSENT)
        if old is not new and (differ(old, new) or not (is_plain(old) and is_plain(new))):
            return name
    return None


def changed_each_time(change: str) -> str:
    """What is said of what each step would change."""
    return (
        f"the program changes what it rests on each time it runs, which a captured step would not: {change}; "
        "keep what changes from step to step in a buffer, or count outside of the step"
    )
