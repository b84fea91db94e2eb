"""Whether tensors are those that constants were packed of, unchanged: the same objects, in the same memory, written as often.

torch's own answers, a call for each tensor, take longer than a small network. What they say lies in words that torch's objects hold. Where
these are is found by experiment: a tensor is written, another's memory is another. Where that does not come out, torch is asked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from operator import is_
from typing import NamedTuple

import torch

from lowtide.base.words import BYTES, Words, python_is_known, word

_address = torch.Tensor.data_ptr
_WORDS = 24  # of a tensor, and of what it points to, that are looked at
_OFFSET = 12_345


class Constants:
    """Tensors as they were when this was made."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self._versions, self._addresses = [*map(_version, tensors)], [*map(_address, tensors)]
        known = None if any(map(torch.Tensor.is_inference, tensors)) else layout()
        self._own = None if known is None else Words(at for tensor in tensors for at in known.own(tensor))
        self._beyond = None if known is None else Words(at for tensor in tensors for at in known.beyond(tensor))

    @property
    def words(self) -> tuple[Words, Words] | None:
        """Their words, and those that these point to; None where they are not known."""
        return None if self._own is None or self._beyond is None else (self._own, self._beyond)

    def same(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are they, unchanged."""
        return len(tensors) == len(self.tensors) and all(map(is_, tensors, self.tensors)) and self.unchanged()

    def unchanged(self) -> bool:
        """Whether they are as they were."""
        # what a tensor points to lies there for as long as it does
        if self._own is not None and self._beyond is not None and self._own.same() and self._beyond.same():
            return True
        return [*map(_version, self.tensors)] == self._versions and [*map(_address, self.tensors)] == self._addresses


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was written; torch does not count that for one that was made in inference mode."""
    return -1 if tensor.is_inference() else tensor._version


class Layout(NamedTuple):
    """Words of a tensor, from its beginning; and of what two of them point to."""

    storage: int
    data: int  # of the storage
    counter: int
    version: int  # of the counter
    offset: int

    def own(self, tensor: torch.Tensor) -> list[int]:
        """The addresses of a tensor's words."""
        return [tensor._cdata + BYTES * at for at in (self.storage, self.counter, self.offset)]

    def beyond(self, tensor: torch.Tensor) -> list[int]:
        """Those of the words that it points to."""
        storage, counter, _ = map(word, self.own(tensor))
        return [storage + BYTES * self.data, counter + BYTES * self.version]


@cache
def layout() -> Layout | None:
    """Where the words are; None where that is not found."""
    if not python_is_known():
        return None
    with torch.inference_mode(False), torch.device("cpu"):  # whatever the caller has set
        return _by_experiment()


def _by_experiment() -> Layout | None:
    one, other = torch.zeros(_OFFSET + 1), torch.zeros(3)
    alike = one.detach()  # shares memory and counter
    pointers = [at for at, here in enumerate(words_of(one)) if here == words_of(alike)[at] != words_of(other)[at] and _is_pointer(here)]
    before = {at: _read(words_of(one)[at]) for at in pointers}
    for _ in range(3):
        one.add_(0)
    versions = [(at, k) for at in pointers for k, now in enumerate(_read(words_of(one)[at])) if now == before[at][k] + 3]
    data = [(at, k) for at in pointers for k, now in enumerate(before[at]) if now == one.data_ptr()]
    part = one[_OFFSET:]
    offsets = [at for at, (mine, its) in enumerate(zip(words_of(part), words_of(one), strict=True)) if (mine, its) == (_OFFSET, 0)]
    if len(versions) != 1 or not data or len(offsets) != 1:
        return None
    return Layout(*data[0], *versions[0], offsets[0])


def words_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The first words of a tensor of torch's."""
    return _read(tensor._cdata)


def _is_pointer(number: int) -> bool:
    return number % BYTES == 0 and number > 2**20


def _read(address: int) -> tuple[int, ...]:
    """Words at what may be no address at all: the system reads them, and says so."""
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            found = memory.read(BYTES * _WORDS)
    except (OSError, ValueError, OverflowError):
        return ()
    return tuple((ctypes.c_uint64 * (len(found) // BYTES)).from_buffer_copy(found[: len(found) // BYTES * BYTES]))
