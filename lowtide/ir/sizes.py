"""Sizes: a count of elements or bytes is a Python int, or a sympy expression over named dimensions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # processes that know of numbers alone start sooner without it
    import sympy

Size: TypeAlias = "int | sympy.Expr"

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "complex32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8,
    "complex128": 16,
    "scalar": 0,  # a Python number: it never meets an allocator
}  # fmt: skip
ROW_BYTES = 16  # rows of a matrix that begin at multiples of it are read by a GPU's fastest kernels


def reach(shape: Sequence[Size], stride: Sequence[Size]) -> int:
    """Elements from a tensor's first to its last, both included; none where an extent is 0. Sizes are numbers."""
    return 0 if 0 in shape else 1 + sum((int(extent) - 1) * int(step) for extent, step in zip(shape, stride, strict=True))


def pinned_block_bytes(nbytes: int) -> int:
    """What PyTorch's allocator of pinned memory takes for so many bytes: a power of two."""
    return 1 << max(nbytes - 1, 0).bit_length()


def product(sizes: Iterable[Size]) -> Size:
    result: Size = 1
    for size in sizes:
        result = result * size
    return result


def contiguous_stride(shape: Sequence[Size]) -> tuple[Size, ...]:
    """Row-major strides of `shape`, in elements, as torch gives a new tensor (a dimension of 0 counts as 1)."""
    stride: list[Size] = []
    step: Size = 1
    for extent in reversed(shape):
        stride.append(step)
        step = step * (1 if extent == 0 else extent)
    return tuple(reversed(stride))
