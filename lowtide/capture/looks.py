"""What fake kernels have said, remembered by how their arguments look: most operators of a program are called alike many times.

torch remembers as well, at ten times the price: it goes over all that a fake tensor can be. Remembered here is what plain tensors of
known sizes give: one new dense result on a storage of its own, or the argument that was written. All else is asked again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

_MOST = 20_000  # looks; what comes later is asked for each time
_SIMPLE = frozenset({int, bool, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_known: dict[Any, Any] = {}


class _UnlikeError(Exception):
    """An argument of which more than its look counts."""


def remembered(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)` under fake tensors. Raises what that raises."""
    writes = _writes(func)
    if writes is None:
        return func(*args, **kwargs)
    tensors: list[FakeTensor] = []
    try:
        key = func, torch.get_default_dtype(), *_looks((args, tuple(kwargs.items())), tensors, writes)
    except _UnlikeError:
        return func(*args, **kwargs)
    if not tensors or (writes and not _lie_apart(tensors)):
        return func(*args, **kwargs)
    found = _known.get(key)
    if found is None:
        out = func(*args, **kwargs)
        found = True if writes and out is args[0] else None if writes else _look(out, tensors)
        if found is not None and len(_known) < _MOST:
            _known[key] = found
        return out
    if writes:
        return args[0]
    shape, stride, dtype, device = found
    with no_dispatch():
        plain = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(tensors[0].fake_mode, plain, device)


@functools.cache
def _writes(func: OpOverload) -> bool | None:
    """Whether an operator writes its first argument and returns it; False where it makes one tensor; None for any other."""
    schema = func._schema
    if len(schema.returns) != 1 or str(schema.returns[0].type) != "Tensor" or func.namespace != "aten":
        return None
    if {torch.Tag.dynamic_output_shape, torch.Tag.inplace_view} & {*func.tags}:
        return None
    aliases = [argument.alias_info for argument in schema.arguments]
    result = schema.returns[0].alias_info
    if result is None:
        return False if not any(aliases) else None
    is_in_place = func.overloadpacket.__name__.endswith("_") and bool(aliases) and aliases[0] is not None and aliases[0].is_write
    return True if is_in_place and result.is_write and not any(aliases[1:]) else None


def _looks(item: Any, tensors: list[FakeTensor], writes: bool) -> Iterator[Any]:
    """What of an argument decides. Numbers do not where a tensor is written: it stays as it is."""
    kind = type(item)
    if kind is FakeTensor:
        shape, stride = tuple(item.shape), item.stride()
        plain = item.layout is torch.strided and item.constant is None and not item.is_conj() and not item.is_neg()
        if not plain or not all(type(extent) is int for extent in (*shape, *stride)):
            raise _UnlikeError
        tensors.append(item)
        yield next(index for index, each in enumerate(tensors) if each is item)
        yield item.dtype, item.device, shape, stride
    elif kind is tuple or kind is list:
        yield len(item)
        for each in item:
            yield from _looks(each, tensors, writes)
    elif kind in _SIMPLE:
        yield kind
        if not writes or (kind is not float and kind is not complex):
            yield item
    else:
        raise _UnlikeError


def _lie_apart(tensors: list[FakeTensor]) -> bool:
    """Whether none of them is a part of another."""
    different = {id(each): each for each in tensors}.values()
    return len({each.untyped_storage()._cdata for each in different}) == len(different)


def _look(out: Any, given: list[FakeTensor]) -> Any:
    """How a result looks; None where more than that counts."""
    if type(out) is not FakeTensor or out.layout is not torch.strided or out.constant is not None or out.is_conj() or out.is_neg():
        return None
    shape, stride = tuple(out.shape), out.stride()
    if out.storage_offset() or not all(type(extent) is int for extent in (*shape, *stride)) or out.fake_mode is not given[0].fake_mode:
        return None
    storage = out.untyped_storage()
    with no_dispatch():
        dense = torch.empty_strided(shape, stride, dtype=out.dtype, device="meta").untyped_storage().nbytes()
    if dense != storage.nbytes() or any(storage._cdata == each.untyped_storage()._cdata for each in given):
        return None
    return shape, stride, out.dtype, out.device
