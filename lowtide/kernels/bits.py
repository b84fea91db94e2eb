"""Masks as bits: a flag for each element, eight of them a byte.

Elements are taken in the order of memory, in blocks of 8 x 8,192; bit k of byte i of a block is element k * 8,192 + i of it. The last
block is smaller: as many bytes as an eighth of its elements, rounded up. So packing and unpacking go over stretches of memory, which
processors do by vectors, and a block stays in the cache. On a CPU the words of a tensor are taken as integers, whatever its dtype; on other
devices whole blocks go through torch's operators, several at once, so that their temporaries stay small.

    pack_bits(x)              which elements are not 0
    pack_positive(x)          of which it is not so that x <= 0: those that a rectifier lets through, and NaN
    unpack_bits(bits, like)   the booleans, in a tensor that lies in memory as `like` does
    masked(x, bits)           x where the flag is set, else 0
    masked_mul(x, bits, p)    x times what dropout multiplies by: 1 / p as its dtype rounds that, or 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from lowtide.base.kernels import SWITCHED_OFF, kernel
from lowtide.kernels.library import define

_ROWS = 2**13  # bytes of a block: its elements stay in the cache
_BLOCK = 8 * _ROWS
_BLOCKS_AT_ONCE = 128  # on other devices than a CPU
_NUMBERS = (torch.float32, torch.float64)  # what kernels can compute with
_WORDS: dict[int, tuple[torch.dtype, type[np.unsignedinteger[Any]]]] = {
    1: (torch.uint8, np.uint8),
    2: (torch.int16, np.uint16),
    4: (torch.int32, np.uint32),
    8: (torch.int64, np.uint64),
}


def pack_bits(x: torch.Tensor) -> torch.Tensor:
    """[ceil(n / 8)] of uint8."""
    return _packed(x)


def pack_positive(x: torch.Tensor) -> torch.Tensor:
    """[ceil(n / 8)] of uint8."""
    if _by_kernels(x) and x.dtype in _NUMBERS:
        out = torch.empty(-(-x.numel() // 8), dtype=torch.uint8)
        _collect_positive(out.numpy(), _flat(x).numpy())
        return out
    return _packed(x, lambda chunk: chunk.le(0).logical_not_())


def unpack_bits(bits: torch.Tensor, size: list[int], stride: list[int]) -> torch.Tensor:
    """Booleans of a size, which lie in memory without gaps."""
    out = torch.empty_strided(size, stride, dtype=torch.bool, device=bits.device)
    if _by_kernels(bits):
        _spread(bits.numpy(), np.ones(1, np.uint8), _words(_flat(out)))
    else:
        for rows, chunk in _chunks(_flat(out)):
            chunk.copy_(_flags(bits[rows], chunk.numel()))
    return out


def masked(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    return masked_out(x, bits, out=torch.empty_like(x))


def masked_out(x: torch.Tensor, bits: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """The same, into a tensor that may be `x`."""
    given, results = _flat(x), _flat(out)
    if _by_kernels(x):
        _select(bits.numpy(), _words(given), _words(results))
        return out
    none = torch.zeros((), dtype=x.dtype, device=x.device)
    for rows, chunk in _chunks(given):
        torch.where(_flags(bits[rows], chunk.numel()), chunk, none, out=results[8 * rows.start :][: chunk.numel()])
    return out


def masked_mul(x: torch.Tensor, bits: torch.Tensor, keep: float) -> torch.Tensor:
    return masked_mul_out(x, bits, keep, out=torch.empty_like(x))


def masked_mul_out(x: torch.Tensor, bits: torch.Tensor, keep: float, *, out: torch.Tensor) -> torch.Tensor:
    """The same, into a tensor that may be `x`."""
    given, results = _flat(x), _flat(out)
    factor = torch.ones(1, dtype=x.dtype, device=x.device).div_(keep)  # by the kernel that eager divides a mask with
    if _by_kernels(x) and x.dtype in _NUMBERS:
        _multiply(bits.numpy(), given.numpy(), factor.numpy(), results.numpy())
        return out
    factors = x.new_empty(min(x.numel(), _at_once(x)))
    for rows, chunk in _chunks(given):
        _fill(bits[rows], factor, factors[: chunk.numel()])
        torch.mul(chunk, factors[: chunk.numel()], out=results[8 * rows.start :][: chunk.numel()])
    return out


def _packed(x: torch.Tensor, flags: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
    """The flags of what is not 0, or of what is so of it."""
    flat = _flat(x)
    out = torch.empty(-(-flat.numel() // 8), dtype=torch.uint8, device=x.device)
    if _by_kernels(x) and flags is None:
        whole = flat.numel() // _BLOCK * _BLOCK
        _collect_whole(out[: whole // 8].numpy(), _words(flat[:whole]))
        _collect(out[whole // 8 :].numpy(), _words(flat[whole:]))
        return out
    for rows, chunk in _chunks(flat):
        given = chunk.ne(0) if flags is None else flags(chunk)
        if _by_kernels(x):
            _collect(out[rows].numpy(), _words(given))
        else:
            _weigh(given, out[rows])
    return out


def _weigh(given: torch.Tensor, bits: torch.Tensor) -> None:
    """The flags of whole blocks, or of one that is smaller, by torch's operators."""
    blocks, rows = _shape(bits)
    padded = torch.nn.functional.pad(given.view(torch.uint8), (0, 8 * bits.numel() - given.numel()))
    weighed = padded.view(blocks, 8, rows) * _weights(given.device)
    bits.view(blocks, rows).copy_(weighed.sum(1, dtype=torch.uint8))


def _fill(bits: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> None:
    """A value [1] where a flag is set, else 0: of whole blocks, or of one that is smaller."""
    if _by_kernels(bits):
        _spread(bits.numpy(), _words(value), _words(out))
    else:
        torch.where(_flags(bits, out.numel()), value, torch.zeros((), dtype=value.dtype, device=value.device), out=out)


def _flags(bits: torch.Tensor, count: int) -> torch.Tensor:
    """[count] booleans, by torch's operators."""
    blocks, rows = _shape(bits)
    return bits.view(blocks, 1, rows).bitwise_and(_weights(bits.device)).ne(0).view(-1)[:count]


def _shape(bits: torch.Tensor) -> tuple[int, int]:
    return max(1, bits.numel() // _ROWS), min(bits.numel(), _ROWS)


def _weights(device: torch.device) -> torch.Tensor:
    planes = torch.arange(8, dtype=torch.uint8, device=device)  # made there: nothing is copied, so that nothing waits
    return torch.ones_like(planes).bitwise_left_shift_(planes).view(8, 1)


def _chunks(flat: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Stretches of elements that are whole blocks, and at last the one that is smaller, with the bytes of their flags."""
    count = flat.numel()
    begin, whole = 0, count // _BLOCK * _BLOCK
    while begin < count:
        end = min(begin + _at_once(flat), whole) if begin < whole else count
        yield slice(begin // 8, -(-end // 8)), flat[begin:end]
        begin = end


def _at_once(x: torch.Tensor) -> int:
    return _BLOCK if x.device.type == "cpu" else _BLOCK * _BLOCKS_AT_ONCE


def _flat(x: torch.Tensor) -> torch.Tensor:
    """The elements in the order of memory, of a tensor without gaps."""
    return x.as_strided((x.numel(),), (1,))


def _by_kernels(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and not SWITCHED_OFF


def _words(x: torch.Tensor) -> Any:
    """The memory of a CPU's tensor as unsigned integers."""
    dtype, word = _WORDS[x.element_size()]
    return x.view(dtype).numpy().view(word)


@kernel(nogil=True)
def _collect(bits: Any, words: Any) -> None:
    """Flags: set where a word is not 0, whatever its sign bit."""
    count, one = len(words), words.dtype.type(1)
    for first in range(0, len(bits), _ROWS):
        block, plane = bits[first : first + _ROWS], np.uint8(0)
        block[:] = np.uint8(0)
        for begin in range(8 * first, min(count, 8 * (first + len(block))), len(block)):
            chunk = words[begin : min(begin + len(block), count)]
            flags = block[: len(chunk)]
            for at in range(len(chunk)):
                flags[at] |= np.uint8((chunk[at] << one) != 0) << plane
            plane += np.uint8(1)


@kernel(nogil=True)
def _collect_whole(bits: Any, words: Any) -> None:
    """The same of whole blocks: all planes at once, each byte written once."""
    one, two, three, four, five, six, seven = (np.uint8(1), np.uint8(2), np.uint8(3), np.uint8(4), np.uint8(5), np.uint8(6), np.uint8(7))
    up = words.dtype.type(1)
    for first in range(0, len(bits), _ROWS):
        block, at = bits[first : first + _ROWS], 8 * first
        a, b, c, d = words[at:], words[at + _ROWS :], words[at + 2 * _ROWS :], words[at + 3 * _ROWS :]
        e, f, g, h = words[at + 4 * _ROWS :], words[at + 5 * _ROWS :], words[at + 6 * _ROWS :], words[at + 7 * _ROWS :]
        for row in range(_ROWS):
            low = np.uint8((a[row] << up) != 0) | (np.uint8((b[row] << up) != 0) << one) | (np.uint8((c[row] << up) != 0) << two)
            middle = (np.uint8((d[row] << up) != 0) << three) | (np.uint8((e[row] << up) != 0) << four)
            high = (np.uint8((f[row] << up) != 0) << five) | (np.uint8((g[row] << up) != 0) << six)
            block[row] = low | middle | high | (np.uint8((h[row] << up) != 0) << seven)


@kernel(nogil=True)
def _collect_positive(bits: Any, numbers: Any) -> None:
    """Flags: set where it is not so that a number is at most 0."""
    count, none = len(numbers), numbers.dtype.type(0)
    for first in range(0, len(bits), _ROWS):
        block, plane = bits[first : first + _ROWS], np.uint8(0)
        block[:] = np.uint8(0)
        for begin in range(8 * first, min(count, 8 * (first + len(block))), len(block)):
            chunk = numbers[begin : min(begin + len(block), count)]
            flags = block[: len(chunk)]
            for at in range(len(chunk)):
                flags[at] |= np.uint8(not (chunk[at] <= none)) << plane
            plane += np.uint8(1)


@kernel(nogil=True)
def _spread(bits: Any, value: Any, out: Any) -> None:
    """A word where a flag is set, else 0."""
    count, word, none = len(out), value[0], out.dtype.type(0)
    for first in range(0, len(bits), _ROWS):
        block, mask = bits[first : first + _ROWS], np.uint8(1)
        for begin in range(8 * first, min(count, 8 * (first + len(block))), len(block)):
            chunk = out[begin : min(begin + len(block), count)]
            flags = block[: len(chunk)]
            for at in range(len(chunk)):
                chunk[at] = word if flags[at] & mask else none
            mask <<= np.uint8(1)


@kernel(nogil=True)
def _select(bits: Any, words: Any, out: Any) -> None:
    """Words where a flag is set, else 0."""
    count, none = len(words), words.dtype.type(0)
    for first in range(0, len(bits), _ROWS):
        block, mask = bits[first : first + _ROWS], np.uint8(1)
        for begin in range(8 * first, min(count, 8 * (first + len(block))), len(block)):
            chunk = words[begin : min(begin + len(block), count)]
            written, flags = out[begin : begin + len(chunk)], block[: len(chunk)]
            for at in range(len(chunk)):
                written[at] = chunk[at] if flags[at] & mask else none
            mask <<= np.uint8(1)


@kernel(nogil=True)
def _multiply(bits: Any, numbers: Any, factor: Any, out: Any) -> None:
    """Numbers times a factor where a flag is set, else times 0."""
    count, one, none = len(numbers), factor[0], numbers.dtype.type(0)
    for first in range(0, len(bits), _ROWS):
        block, mask = bits[first : first + _ROWS], np.uint8(1)
        for begin in range(8 * first, min(count, 8 * (first + len(block))), len(block)):
            chunk = numbers[begin : min(begin + len(block), count)]
            written, flags = out[begin : begin + len(chunk)], block[: len(chunk)]
            for at in range(len(chunk)):
                written[at] = chunk[at] * (one if flags[at] & mask else none)
            mask <<= np.uint8(1)


define("pack_bits(Tensor self) -> Tensor", pack_bits)
define("pack_positive(Tensor self) -> Tensor", pack_positive)
define("unpack_bits(Tensor bits, int[] size, int[] stride) -> Tensor", unpack_bits)
define("masked(Tensor self, Tensor bits) -> Tensor", masked)
define("masked.out(Tensor self, Tensor bits, *, Tensor(a!) out) -> Tensor(a!)", masked_out)
define("masked_mul(Tensor self, Tensor bits, float keep) -> Tensor", masked_mul)
define("masked_mul.out(Tensor self, Tensor bits, float keep, *, Tensor(a!) out) -> Tensor(a!)", masked_mul_out)
