"""Kinds of numbers by the names that NumPy and onnx share: how many bits each takes in a memory, and to bytes and back.

Numbers of less than a byte are packed, the first in the low bits, as ONNX packs them (TensorProto, "int32_data").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BITS = {
    "bool": 8, "int8": 8, "uint8": 8, "int16": 16, "uint16": 16, "int32": 32, "uint32": 32, "int64": 64, "uint64": 64,
    "float16": 16, "float32": 32, "float64": 64, "bfloat16": 16, "complex64": 64, "complex128": 128,
    "float8_e4m3fn": 8, "float8_e4m3fnuz": 8, "float8_e5m2": 8, "float8_e5m2fnuz": 8, "float8_e8m0fnu": 8,
    "float4_e2m1fn": 4, "int4": 4, "uint4": 4, "int2": 2, "uint2": 2,
}  # fmt: skip
_BARE = {np.dtype(name).name for name in ("?", *"bBhHiIlLqQefdFD")}  # that NumPy knows by itself


def stored_bytes(shape: Sequence[int], dtype: str) -> int:
    """The bytes that a tensor of this shape takes. Raises KeyError for a dtype that is none of `BITS`."""
    return -(-math.prod(shape) * BITS[dtype] // 8)


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """NumPy's dtype of a name; those that NumPy lacks come from ml_dtypes, which onnx brings."""
    if dtype in _BARE:
        return np.dtype(dtype)
    import ml_dtypes

    other: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype))
    return other


def to_bytes(array: NDArray[Any], dtype: str) -> NDArray[np.uint8]:
    """[bytes] an array as a memory holds it."""
    numbers = np.ascontiguousarray(array, numpy_dtype(dtype)).reshape(-1).view(np.uint8)
    if BITS[dtype] >= 8:
        return numbers
    per_byte = 8 // BITS[dtype]
    padded = np.zeros(-(-len(numbers) // per_byte) * per_byte, np.uint8)
    padded[: len(numbers)] = numbers & (2 ** BITS[dtype] - 1)
    shifts = np.arange(per_byte, dtype=np.uint8) * np.uint8(BITS[dtype])
    packed: NDArray[np.uint8] = np.bitwise_or.reduce(padded.reshape(-1, per_byte) << shifts, axis=1).astype(np.uint8)
    return packed


def from_bytes(raw: NDArray[np.uint8], dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    """[shape] the array whose bytes a memory holds: a copy."""
    if BITS[dtype] >= 8:
        return raw.copy().view(numpy_dtype(dtype)).reshape(shape)
    bits = BITS[dtype]
    shifts = np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits)
    numbers = (raw[:, None] >> shifts & np.uint8(2**bits - 1)).reshape(-1)[: math.prod(shape)].astype(np.uint8)
    if dtype.startswith("int"):  # ml_dtypes reads the sign from the low bits alone
        signed = (numbers << np.uint8(8 - bits)).view(np.int8) >> np.int8(8 - bits)
        return signed.astype(numpy_dtype(dtype)).reshape(shape)
    return numbers.view(numpy_dtype(dtype)).reshape(shape)
