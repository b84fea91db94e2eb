"""How the arguments and results of a call look, where that is all that counts; and results made anew from their looks.

Most operators of a program are called alike many times. Of a call that looks like an earlier one it is known what comes out: new dense
results on storages of their own, a view of the first argument, or that argument, which was written. Of all else more than looks counts:
tensors that are no plain ones, sizes that are symbols, arguments that are no plain Python.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from lowtide.capture import calls
from lowtide.capture.blocks import address
from lowtide.ir.result_specs import pieces_of

NEW, VIEW, WRITTEN = "new", "view", "written"
_PLAIN = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_AS_VIEW = torch.ops.aten.as_strided.default._op_dk  # by the kernel for what has no memory: torch may have none for the device

ResultLayout: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, torch.device]"  # shape, stride, offset, dtype, device

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)  # classes of tensors that have nothing of their own


class NoLookError(Exception):
    """An argument of which more than its look counts."""


@functools.cache
def kind_of(func: OpOverload) -> str | None:
    """Whether an operator makes tensors, or gives a view of its first argument, or writes that and returns it; None for any other."""
    schema = func._schema
    aliases = [argument.alias_info for argument in schema.arguments]
    over_lists = calls.is_over_lists(func)
    if func.namespace != "aten" or not (schema.returns or over_lists):
        return None
    if func is torch.ops.aten.as_strided.default:  # its offset is from where the storage begins, not its first argument
        return None
    if any(str(each.type) != ("List[Tensor]" if over_lists else "Tensor") for each in schema.returns):
        return None
    if {torch.Tag.dynamic_output_shape, torch.Tag.inplace_view} & {*func.tags}:
        return None
    if func is torch.ops.aten._unsafe_view.default:  # its schema says new, and its result lies where the argument does
        return VIEW
    if schema.returns and not any(aliases) and not any(each.alias_info for each in schema.returns):
        return NEW
    first, result = aliases[0] if aliases else None, schema.returns[0].alias_info if schema.returns else None
    if first is None or (result is None and not over_lists) or any(aliases[1:]) or len(schema.returns) > 1:
        return None
    if not first.is_write:
        return VIEW if func.is_view else None
    return WRITTEN if func.overloadpacket.__name__.endswith("_") else None


def look_of(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[FakeTensor]) -> tuple[Any, ...]:
    """What decides how the results of a call look; its tensors are appended to `tensors`. Raises NoLookError.

    Numbers do not count where elements are computed one by one, or the result is a tensor that was there.
    """
    key: list[Any] = [func, torch.get_default_dtype()]
    numbers = kind_of(func) is not WRITTEN and not calls.is_over_lists(func) and torch.Tag.pointwise not in func.tags
    for item in args:
        _add(key, item, tensors, numbers)
    for name, item in kwargs.items():
        key.append(name)
        _add(key, item, tensors, numbers)
    return tuple(key)


def _add(key: list[Any], item: Any, tensors: list[FakeTensor], numbers: bool) -> None:
    kind = type(item)
    if kind is FakeTensor:
        shape, stride = tuple(item.shape), item.stride()
        if item.fake_mode.shape_env is not None or not is_plain(item):  # storages may be of symbolic sizes where shapes are not
            raise NoLookError
        tensors.append(item)
        key += (next(at for at, each in enumerate(tensors) if each is item), item.dtype, item.fake_device, shape, stride)
    elif kind is float or kind is complex:
        key += (kind, item if numbers else None)
    elif kind in _PLAIN:
        key += (kind, item)
    elif kind is tuple or kind is list:
        key.append(len(item))
        for each in item:
            _add(key, each, tensors, numbers)
    else:
        raise NoLookError


def is_plain(tensor: FakeTensor) -> bool:
    """Whether a tensor is dense, stands for the bytes that it lies on, and has numbers for sizes."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    return all(type(extent) is int for extent in (*tensor.shape, *tensor.stride(), tensor.storage_offset()))


def layouts_of(func: OpOverload, out: Any, given: Sequence[FakeTensor]) -> tuple[ResultLayout, ...] | None:
    """How what came out of a call lies, the offset of a view from where its first tensor begins; None where more than looks counts."""
    kind, pieces = kind_of(func), pieces_of(out)
    if kind is WRITTEN:
        return () if out is given[0] or out is None else None
    if any(type(piece) is not FakeTensor or piece.fake_mode is not given[0].fake_mode or not is_plain(piece) for piece in pieces):
        return None
    first = given[0].storage_offset() if kind is VIEW else 0
    layouts = tuple((tuple(each.shape), each.stride(), each.storage_offset() - first, each.dtype, each.fake_device) for each in pieces)
    if kind is VIEW:
        same = address(out) == address(given[0]) and out.dtype is given[0].dtype and out.fake_device == given[0].fake_device
        return layouts if same else None
    with no_dispatch():
        dense = [torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, _, dtype, _ in layouts]
    sizes = [(plain.untyped_storage().nbytes(), piece.untyped_storage().nbytes()) for plain, piece in zip(dense, pieces, strict=True)]
    apart = len({*map(address, pieces), *map(address, given)}) == len(pieces) + len({*map(address, given)})
    return None if not apart or any(one != two for one, two in sizes) or any(offset for _, _, offset, *_ in layouts) else layouts


def fakes_of(func: OpOverload, layouts: Sequence[ResultLayout], first: FakeTensor) -> list[FakeTensor]:
    """Tensors that lie so, on storages of their own or on that of the first that a call was given."""
    mode = first.fake_mode
    with no_dispatch():
        if kind_of(func) is VIEW:
            ((shape, stride, offset, _, device),) = layouts
            viewed = _AS_VIEW(torch._C.DispatchKey.Meta, first, shape, stride, first.storage_offset() + offset)
            return [FakeTensor(mode, viewed, device)]
        plain = [torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, _, dtype, _ in layouts]
        return [FakeTensor(mode, each, device) for each, (*_, device) in zip(plain, layouts, strict=True)]


def another(tensor: FakeTensor) -> FakeTensor:
    """A fake that looks the same, on a storage of its own."""
    with no_dispatch():
        plain = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(tensor.fake_mode, plain, tensor.fake_device)


@functools.cache
def is_made_of_tensors(kind: type) -> bool:
    """Whether a class of tensors says what plain ones its tensors are made of. Torch's own (nested tensors, say) are refused elsewhere."""
    return hasattr(kind, "__tensor_flatten__") and not f"{kind.__module__}.".startswith("torch.")
