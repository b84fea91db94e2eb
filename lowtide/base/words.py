"""Words of this process's memory: whether they are what they were, in a nanosecond each.

What Python's and torch's objects know of themselves lies at fixed places in them. Reading these there takes a tenth of what asking each
object does. Where such a place is, is found by experiment, and where the experiment does not come out, nobody reads there.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np

from lowtide.base.kernels import kernel

BYTES = 8
_FIRST = 4096  # below that lies nothing
# In Python's objects: a container's length, a type, the number of a dictionary's last change, the dictionary that a view shows,
# the first item of a tuple.
_SIZE, _SET_SIZE, _TYPE, _TAG, _SHOWN, _ITEMS = 16, 24, 8, 24, 16, 24


class Words:
    """Words at addresses that are multiples of eight. Whoever makes this keeps what lies there alive."""

    def __init__(self, addresses: Iterable[int]) -> None:
        self._places = (np.array([*addresses], np.int64) - _FIRST) // BYTES
        self.renew()

    @property
    def addresses(self) -> Any:
        """Where they are."""
        return self._places.astype(np.uint64) * BYTES + _FIRST

    def renew(self) -> None:
        """Let them be right as they are now."""
        self.seen = _memory()[self._places]

    def same(self) -> bool:
        """Whether all are what they were."""
        return bool(_same(_memory(), self._places, self.seen))


def word(address: int) -> int:
    """The one at an address, which must be readable."""
    return int(ctypes.c_uint64.from_address(address).value)


def length_of(container: Any) -> int:
    """Where a dictionary, list, tuple, deque or set says how many it holds."""
    return id(container) + (_SET_SIZE if isinstance(container, set) else _SIZE)


def items_of(held: tuple[Any, ...]) -> int:
    """Where a tuple's items are."""
    return id(held) + _ITEMS


def dictionary_of(table: Any) -> int:
    """The address of a dictionary: itself, or what a read-only view shows of one. 0 for a view of something else."""
    if type(table) is not MappingProxyType:
        return id(table)
    if not python_is_known():
        return 0
    shown = word(id(table) + _SHOWN)
    return shown if word(shown + _TYPE) == id(dict) else 0


def type_of(thing: Any) -> int:
    """Where an object says of which class it is."""
    return id(thing) + _TYPE


def tag_of(dictionary: Any) -> int:
    """Where a dictionary says when it was last changed: no two changes in a process have the same number."""
    return dictionary_of(dictionary) + _TAG


@cache
def python_is_known() -> bool:
    """Whether lengths and types lie where they are looked for."""
    if sys.implementation.name != "cpython" or ctypes.sizeof(ctypes.c_void_p) != BYTES:
        return False
    held: list[Any] = [[1, 2, 3], {1: 1, 2: 2, 3: 3}, {1, 2, 3}]
    view = MappingProxyType(held[1])
    return word(id(view) + _SHOWN) == id(held[1]) and all(
        word(length_of(each)) == 3 and word(type_of(each)) == id(type(each)) for each in held
    )


@cache
def tags_are_known() -> bool:
    """Whether dictionaries number their changes; they do up to Python 3.12."""
    if sys.version_info >= (3, 13) or not python_is_known():
        return False
    thing = _Thing()
    seen = [word(tag_of(thing.__dict__))]
    for value in (1, 2, 2):  # another object, an equal one too, is another number
        thing.attribute = [value]
        seen.append(word(tag_of(thing.__dict__)))
    del thing.attribute
    seen.append(word(tag_of(thing.__dict__)))
    return len(set(seen)) == len(seen)


class _Thing:
    attribute: Any


@cache
def _memory() -> Any:
    """All of it, as numbers."""
    return np.ctypeslib.as_array((ctypes.c_uint64 * (2**47 // BYTES - _FIRST)).from_address(_FIRST))


@kernel
def _same(memory: Any, places: Any, words: Any) -> Any:
    other = np.uint64(0)
    for at in range(len(places)):
        other |= memory[places[at]] ^ words[at]
    return other == 0
