"""Whether a program's constants, and all else that words tell of, are what they were: looked at by native code, by a team of threads.

Words of some thousand objects lie in no near cache after a run, and each thread waits for its share of them beside the others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lowtide.base.words import Words
from lowtide.runtime.networks.built import Experience, Team
from lowtide.runtime.networks.native import native

_PARTS = 4  # that threads share among them
_OWN, _BEYOND = 3, 2  # words of each tensor


class Seen(NamedTuple):
    """Tensors as their words tell. What these lead to lies where it does while they are the same."""

    own: Words
    beyond: Words  # of what tensors point to
    marks: Sequence[int]  # where one number of 32 bits of each of some tensors is
    marked: Sequence[int]  # which tensor each is of
    alive: object  # keeps all of it


class _Part(ctypes.Structure):
    _fields_ = tuple(
        field
        for name in ("firm", "beyond", "marks")
        for field in ((name, ctypes.c_int64), (f"{name}_at", ctypes.c_void_p), (f"{name}_seen", ctypes.c_void_p))
    )


class _Watched(ctypes.Structure):
    _fields_ = (
        ("parts", ctypes.c_int64),
        ("part", ctypes.c_void_p),
        ("runs", ctypes.c_void_p),
        ("experience", ctypes.c_void_p),
        ("spin_us", ctypes.c_int64),
        ("differs", ctypes.c_int64),
    )


class Unchanged:
    """Whether words are what they were, and all that tells of some groups of tensors."""

    def __init__(self, words: Sequence[Words], tensors: Sequence[Seen], team: Team, spin_us: int) -> None:
        shares = [_shares(each) for each in tensors]
        plain = [[*map(_Pair, *(np.array_split(each, _PARTS) for each in (its.addresses, its.seen)))] for its in words]
        arrays = [_part_of([each[at] for each in plain], [each[at] for each in shares]) for at in range(_PARTS)]
        self._parts, self._experience = (_Part * _PARTS)(*map(_part, arrays)), Experience()
        self._held = arrays, team, [each.alive for each in tensors]
        run, experience = ctypes.cast(team.run, ctypes.c_void_p).value, ctypes.addressof(self._experience)
        self._its = _Watched(_PARTS, ctypes.addressof(self._parts), run, experience, spin_us, 0)
        self._at, self._same = ctypes.addressof(self._its), native().unchanged

    def __call__(self, threads: int) -> bool:
        """Whether they are, as so many threads see it."""
        return bool(self._same(self._at, threads))


class _Pair(NamedTuple):
    """Addresses, and what was seen there."""

    at: Any
    seen: Any


def _shares(seen: Seen) -> list[tuple[_Pair, _Pair, _Pair]]:
    """For each part its tensors' words, those that these lead to, and marks: a tensor is in one part with all that it leads to."""
    own, beyond = _by_tensor(seen.own, _OWN), _by_tensor(seen.beyond, _BEYOND)
    marks = np.array(seen.marks, np.uint64), np.array([ctypes.c_uint32.from_address(each).value for each in seen.marks], np.uint32)
    found = []
    for tensors in np.array_split(np.arange(len(own.at)), _PARTS):
        marked = np.isin(seen.marked, tensors)
        first, then = (_Pair(*(each[tensors].ravel() for each in pair)) for pair in (own, beyond))
        found.append((first, then, _Pair(*(each[marked] for each in marks))))
    return found


def _by_tensor(words: Words, each: int) -> _Pair:
    return _Pair(words.addresses.reshape(-1, each), words.seen.reshape(-1, each))


def _part_of(plain: Sequence[_Pair], tensors: Sequence[tuple[_Pair, _Pair, _Pair]]) -> list[Any]:
    """Addresses and what was seen there, of words, of those that these lead to, and of marks."""
    kinds = [*plain, *(each[0] for each in tensors)], [each[1] for each in tensors], [each[2] for each in tensors]
    return [np.concatenate(each) for pairs in kinds for each in zip(*pairs, strict=True)]


def _part(arrays: Sequence[Any]) -> _Part:
    counts_and_arrays = zip(arrays[::2], arrays[1::2], strict=True)
    return _Part(*(each for at, seen in counts_and_arrays for each in (len(at), at.ctypes.data, seen.ctypes.data)))
