"""What an operator makes: the looks of its results, as a real run left them, compared with what a graph says; and how tensors lie."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lowtide.ir.graph import Node, Value
from lowtide.ir.sizes import ITEM_BYTES, Size, product

_DTYPES = ITEM_BYTES.keys() - {"scalar"}
_DEVICE = re.compile(r"\w+(:\d{1,9})?", re.ASCII)
_MOST = 2**60


@dataclass(frozen=True, slots=True)
class ResultSpec:
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    offset: int  # elements
    nbytes: int  # of the storage that it lies on
    device: str

    def is_like(self, other: ResultSpec) -> bool:
        """Whether two results are one for whoever reads them: strides mean nothing along extents of 1, nor in a tensor without elements."""
        mine, theirs = (self.dtype, self.shape, self.nbytes, self.device), (other.dtype, other.shape, other.nbytes, other.device)
        return mine == theirs and (0 in self.shape or (self.offset == other.offset and same_strides(self.shape, self.stride, other.stride)))


Results: TypeAlias = tuple["ResultSpec | None", ...]  # in the operator's order; None for what is no tensor, or was not made
# What a call really gives: of (the call, the nodes recorded before it, the bytes that it is thought to make, what it is thought to give, or
# None where nobody has an idea); None where that is unknown, or not known yet.
Really: TypeAlias = Callable[[Node, Sequence[Node], int, "Results | None"], "Results | None"]


def unknown(call: Node, before: Sequence[Node], makes_bytes: int, thought: Results | None) -> Results | None:
    """A `Really` that knows nothing."""
    return None


def differ(thought: Results, real: Results) -> bool:
    """Whether a call gives otherwise than thought, of what is known of both."""
    if len(thought) != len(real):
        return False
    return any(mine is not None and real_spec is not None and mine != real_spec for mine, real_spec in zip(thought, real, strict=True))


def same_strides(shape: Sequence[int], one: Sequence[int], two: Sequence[int]) -> bool:
    """Whether strides say the same of a shape: those along extents of 1 mean nothing, and those of a tensor without elements.

    But for images and volumes: whether their channels lie last, by which kernels for them choose, torch reads off all strides.
    """
    if tuple(one) == tuple(two) or 0 in shape:
        return True
    if any(extent != 1 and mine != theirs for extent, mine, theirs in zip(shape, one, two, strict=True)):
        return False
    return len(shape) not in (4, 5) or _channels_last(shape, one) == _channels_last(shape, two)


def is_gapless(shape: Sequence[Size], stride: Sequence[Size]) -> bool:
    """Whether elements lie one behind the other, each once, in whatever order of the dimensions."""
    from lowtide.ir.shapes.polynomial import normal  # with sympy, which processes that try operators do without

    left, step = [(extent, each) for extent, each in zip(shape, stride, strict=True) if extent != 1], product(())
    while left:
        run = next((pair for pair in left if pair[1] == step), None)
        if run is None:
            return False
        left.remove(run)
        step = normal(step * run[0])
    return True


def _channels_last(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether torch takes a tensor to have its channels last (c10/core/MemoryFormat.h, is_channels_last_strides)."""
    least = 0
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        if stride[dim] < max(least, dim == 1) or (dim == 0 and least == stride[1]):
            return False
        least = stride[dim] * max(1, shape[dim])
    return True


def made_as(value: Value) -> ResultSpec | None:
    """A value of a graph as the look of a result; None where its sizes are no numbers."""
    sizes = (*value.shape, *value.stride, value.offset, value.storage.nbytes)
    numbers = [size for size in sizes if isinstance(size, int)]
    if len(numbers) < len(sizes):
        return None
    rank = len(value.shape)
    shape, stride = tuple(numbers[:rank]), tuple(numbers[rank : 2 * rank])
    return ResultSpec(value.dtype, shape, stride, numbers[-2], numbers[-1], value.storage.device)


def to_text(results: Results) -> str:
    return json.dumps([None if each is None else _fields(each) for each in results])


def parse(text: str) -> Results:
    """The results that a line says. Raises ValueError for any other line."""
    document = json.loads(text)
    if not isinstance(document, list):
        raise ValueError(f"expected a list of results, got {text[:100]!r}")
    return tuple(map(of_fields, document))


def of_fields(fields: object) -> ResultSpec | None:
    """The result of [dtype, shape, stride, offset, bytes, device], or of None. Raises ValueError for what is neither."""
    if fields is None:
        return None
    if not isinstance(fields, list) or len(fields) != 6:
        raise ValueError(f"expected [dtype, shape, stride, offset, bytes, device], got {fields!r}")
    dtype, shape, stride, offset, nbytes, device = fields
    if not isinstance(dtype, str) or dtype not in _DTYPES or not isinstance(device, str) or not _DEVICE.fullmatch(device):
        raise ValueError(f"expected a dtype and a device, got {dtype!r} and {device!r}")
    if not isinstance(shape, list) or not isinstance(stride, list) or len(shape) != len(stride):
        raise ValueError(f"expected as many strides as extents, got {shape!r} and {stride!r}")
    if not all(type(size) is int and 0 <= size <= _MOST for size in (*shape, *stride, offset, nbytes)):
        raise ValueError(f"expected sizes from 0 to {_MOST}, got {fields!r}")
    reach = 0 if 0 in shape else 1 + offset + sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))
    if reach * ITEM_BYTES[dtype] > nbytes:
        raise ValueError(f"expected a storage of at least {reach} elements, got {nbytes} bytes")
    return ResultSpec(dtype, tuple(shape), tuple(stride), offset, nbytes, device)


def _fields(spec: ResultSpec) -> list[object]:
    return [spec.dtype, list(spec.shape), list(spec.stride), spec.offset, spec.nbytes, spec.device]


def pieces_of(out: Any) -> list[Any]:
    """What an operator returns, tensor by tensor: a list counts as its items, also where it is one of several results."""
    items = out if isinstance(out, (list, tuple)) else () if out is None else (out,)
    return [piece for item in items for piece in (item if isinstance(item, (list, tuple)) else (item,))]
