"""Whether dictionaries hold what they held: keys and values by identity, in some nanoseconds each and without a look at what they are.

For plain dictionaries, what classes show of theirs, and subclasses that iterate as these do: an `OrderedDict` keeps an order beside, which
is not looked at.
Where dictionaries number their changes, these numbers are read first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import numpy as np

from lowtide.base.kernels import SWITCHED_OFF, kernel, python_function
from lowtide.base.words import Words, dictionary_of, tag_of, tags_are_known

_values = methodcaller("values")
_NEXT = python_function("PyDict_Next", "int32", "uintp", "uintp", "uintp", "uintp")  # dictionary, position, key and value: addresses


class Held:
    """What dictionaries hold when this is made; it is kept alive, so that nothing else can lie at its address."""

    def __init__(self, dictionaries: Iterable[Mapping[Any, Any]]) -> None:
        self._dictionaries = tuple(dictionaries)
        self._keys = [*chain.from_iterable(self._dictionaries)]
        self._values = [*chain.from_iterable(map(_values, self._dictionaries))]
        self._lengths = np.array([*map(len, self._dictionaries)], np.int64)
        addresses = [*map(dictionary_of, self._dictionaries)], [*map(id, self._keys)], [*map(id, self._values)]
        self._addresses = tuple(np.array(each, np.uintp) for each in addresses)
        self._cell = np.zeros(3, np.uintp)  # position, key, value
        self.tags = Words(map(tag_of, self._dictionaries)) if tags_are_known() and not SWITCHED_OFF else None

    def same(self) -> bool:
        """Whether they hold the same objects in the same order."""
        if self.tags is None:
            return self._looked()
        if self.tags.same():
            return True
        found = self._looked()
        if found:
            self.tags.renew()
        return found

    def _looked(self) -> bool:
        if SWITCHED_OFF:
            return self._same()
        dictionaries, keys, values = self._addresses
        return bool(_same(dictionaries, self._lengths, keys, values, self._cell, self._cell.ctypes.data))

    def _same(self) -> bool:
        lengths = [*map(len, self._dictionaries)] == self._lengths.tolist()
        values = chain.from_iterable(map(_values, self._dictionaries))
        return lengths and all(map(is_, chain.from_iterable(self._dictionaries), self._keys)) and all(map(is_, values, self._values))


@kernel
def _same(dictionaries: Any, lengths: Any, keys: Any, values: Any, cell: Any, at: Any) -> Any:
    entry = 0
    for which in range(len(dictionaries)):
        end = entry + lengths[which]
        cell[0] = 0
        while _NEXT(dictionaries[which], at, at + 8, at + 16):
            if entry == end or cell[1] != keys[entry] or cell[2] != values[entry]:
                return False
            entry += 1
        if entry != end:
            return False
    return True
