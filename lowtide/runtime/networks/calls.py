"""Calls of a network from the tuple of its arguments on, by native code: looks of tensors are words of theirs, as in another call.

Where these words are is found by experiment, as for constants: tensors that look alike have them in common, and none that looks otherwise
has them all. Where that does not come out, or no compiler is there, there are no such calls, and Python asks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from lowtide.base.words import BYTES, items_of, length_of, python_is_known, type_of, word
from lowtide.runtime.compiler import NativeError
from lowtide.runtime.networks.constants import Layout, layout, words_of
from lowtide.runtime.networks.native import native
from lowtide.runtime.networks.running import SPIN_US, Held

_PYTHON_WORDS = range(2, 6)  # of a tensor's Python object, one of which is the address of torch's
_MOST_DIMENSIONS = 5  # whose sizes lie in a tensor itself
_TIMES = 3  # tensors are made that look otherwise: chance is not to tell them
_ALL, _LOWER = 2**64 - 1, 2**32 - 1


class _Offsets(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("length", "items", "kind", "tensor", "storage", "data", "offset"))


class _Call(ctypes.Structure):
    _fields_ = (
        ("offsets", _Offsets),
        ("kind", ctypes.c_void_p),
        ("arguments", ctypes.c_int64),
        ("looks", ctypes.c_int64),
        ("look", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("looked", ctypes.c_void_p),
        ("live", ctypes.c_int64),
        ("which", ctypes.c_void_p),
        ("item_bytes", ctypes.c_void_p),
        ("runs", ctypes.c_void_p),
        ("network", ctypes.c_void_p),
        ("experience", ctypes.c_void_p),
        ("spin_us", ctypes.c_int64),
    )


class Calls:
    """Calls of a network on tensors that look as those of one call. Whoever calls knows that all else is unchanged."""

    def __init__(self, held: Held, batch: Sequence[torch.Tensor], live: Sequence[int], found: _Found) -> None:
        looked = np.array([[words_of(tensor)[each.at] for each in found.look] for tensor in batch], np.uint64)
        at, masks = np.array([each.at * BYTES for each in found.look], np.int64), np.array([each.mask for each in found.look], np.uint64)
        item_bytes = np.array([batch[at].element_size() for at in live], np.int64)
        arrays = at, masks, looked, np.array(live, np.int64), item_bytes
        self._held, self._arrays = held, arrays
        look, mask, words, which, sizes = (each.ctypes.data for each in arrays)
        self._its = _Call(
            found.offsets, id(torch.Tensor), len(batch), len(found.look), look, mask, words, len(live), which, sizes,
            ctypes.cast(held.team.run, ctypes.c_void_p).value, held.its.address, held.experience_at, SPIN_US,
        )  # fmt: skip
        self._at, self._call = ctypes.addressof(self._its), native().call

    @classmethod
    def of(cls, held: Held, batch: Sequence[Any], live: Sequence[int]) -> Calls | None:
        """Those for tensors like these, of which the network reads some; None where native code cannot tell what is alike."""
        found = _found()
        if found is None or len(live) != len(held.its.live) or not all(map(_is_plain, batch)):
            return None
        return cls(held, batch, live, found)

    def __call__(self, args: tuple[Any, ...], at: Any, threads: int) -> bool:
        """Run, with `at` for the addresses, on up to so many threads; False where arguments are not seen to look alike, and nothing ran."""
        return bool(self._call(self._at, args, at, threads))


class _Word(NamedTuple):
    """One of a tensor's."""

    at: int
    mask: int  # the bits that count


class _Found(NamedTuple):
    """Where things are."""

    offsets: _Offsets
    look: tuple[_Word, ...]  # of a tensor


@cache
def _found() -> _Found | None:
    """None where they are not found."""
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):  # whatever the caller has set
        try:
            return _by_experiment()
        except (RuntimeError, NotImplementedError, AttributeError):  # of a torch in which tensors like these cannot be made
            return None


def _by_experiment() -> _Found | None:
    known, alike = layout(), _alike()
    held = (alike[0], alike[1], 1)
    items = items_of(held)
    if known is None or not python_is_known() or [word(items + BYTES * at) for at in range(3)] != [*map(id, held)]:
        return None
    tensors = [at for at in _PYTHON_WORDS if all(word(id(each) + BYTES * at) == each._cdata for each in alike)]
    look = _look(alike)
    if not tensors or not look or word(length_of(held)) != len(held) or any(_data(each, known) != each.data_ptr() for each in alike):
        return None
    try:
        native()
    except NativeError:
        return None
    ours = (length_of(held) - id(held), items - id(held), type_of(held) - id(held), BYTES * tensors[0])
    return _Found(_Offsets(*ours, *(BYTES * at for at in (known.storage, known.data, known.offset))), look)


def _data(tensor: torch.Tensor, known: Layout) -> int:
    """Where a tensor's data are, by its words."""
    storage, _, offset = map(word, known.own(tensor))
    return word(storage + BYTES * known.data) + offset * tensor.element_size()


def _look(alike: Sequence[torch.Tensor]) -> tuple[_Word, ...]:
    """The words that are alike in tensors that are, up to their dispatch keys, which are the last; none where these do not tell others."""
    words = [*map(words_of, alike)]
    raw, integers = torch._C._dispatch_keys(alike[0]).raw_repr(), words_of(alike[0].to(torch.int32))
    keys = [at for at in range(len(words[0])) if all(each[at] == raw for each in words)]
    # what stands behind a type in its word follows from the strides, and not all of it is set
    halves = [_ALL if one == other else _LOWER for one, other in zip(words[0], integers, strict=True)]
    found = [_Word(at, _mask([each[at] for each in words]) & halves[at]) for at in range(keys[0] + 1)] if keys else []
    others = [words_of(other) for _ in range(_TIMES) for other in _others(alike[0])]
    tells = all(any((other[each.at] ^ words[0][each.at]) & each.mask for each in found) for other in others)
    return tuple(each for each in found if each.mask) if tells else ()


def _mask(words: Sequence[int]) -> int:
    """The bits of a word that count: all, or the lower half where behind it lies what nobody has set, or none."""
    differing = 0
    for each in words:
        differing |= each ^ words[0]
    return 0 if differing & _LOWER else _LOWER if differing else _ALL


def _alike() -> list[torch.Tensor]:
    """Tensors that look alike, as different as such can be: of gradients, counted otherwise, parts, of other memory."""
    shape = (3, 5, 7, 11)
    trained = torch.ones(shape, dtype=torch.float32, requires_grad=True)
    kept = torch.ones(shape, dtype=torch.float32)
    made = trained * kept  # which keeps both for its gradient
    made.retain_grad()
    written = torch.ones(shape, dtype=torch.float32).add_(1)
    part = torch.zeros(4, *shape[1:], dtype=torch.float32)[1:]
    return [torch.zeros(shape, dtype=torch.float32), trained, kept, made, written, part, torch.from_numpy(np.zeros(shape, np.float32))]


def _others(like: torch.Tensor) -> list[torch.Tensor]:
    """Tensors that look otherwise in one way each."""
    turned = like.transpose(1, 2).contiguous()
    other_sizes, other_strides = turned, turned.transpose(1, 2)
    kinds = [like.to(dtype) for dtype in (torch.int32, torch.float64, torch.bfloat16, torch.complex64)]
    lazy = [torch._neg_view(like), torch.zeros(like.shape, dtype=torch.complex64).conj()]
    return [other_sizes, other_strides, *kinds, *lazy, like.to("meta"), like.to_sparse(), like[0], like.flatten(), like[:, :, :, :10]]


def _is_plain(tensor: Any) -> bool:
    """Whether sizes and strides are among the words of a tensor."""
    if type(tensor) is not torch.Tensor or not 0 < tensor.dim() <= _MOST_DIMENSIONS:
        return False
    words, last = words_of(tensor), tensor.dim()
    runs = {words[at : at + last] for at in range(len(words))}
    return tuple(tensor.shape) in runs and tensor.stride() in runs
