"""A file of one text and tensors, without any code or pickle in it.

    lowtide.frozen 1 5120 9f86d081..(64 digits)     magic, version, bytes of the text, its SHA-256; a line of 128 bytes
    {"..": .., "blocks": [[offset, bytes, crc32], ..], "tensors": [[block, dtype, shape, strides], ..]}
    ....                                            blocks, each on a boundary of 64 bytes; offsets count from the first one

A tensor is a view of a block. Those that are one in memory, as tied weights, are one block. Each is looked at before it is used: a file
that was cut short or damaged is refused, whatever part of it was.

What a function returns is text there, and back: nested tuples, lists and dictionaries of tensors and plain values.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lowtide.base import fields
from lowtide.base.files import mapped, write_whole
from lowtide.cost.operators import dtype_name, of_torch
from lowtide.errors import FormatError, StepError
from lowtide.ir.sizes import ITEM_BYTES, reach

_HEAD_BYTES, _ALIGN_BYTES = 128, 64
_MAGIC, _VERSION = b"lowtide.frozen", 1
_HEAD = re.compile(rb"lowtide\.frozen (\d{1,9}) (\d{1,12}) ([0-9a-f]{64}) *\n")


def write(path: str | os.PathLike[str], contents: dict[str, Any], tensors: Sequence[Tensor]) -> None:
    """Write a file as told above. Raises StepError for a tensor that cannot be held, OSError."""
    blocks = _Blocks()
    entries = [blocks.entry(tensor) for tensor in tensors]
    text = json.dumps({**contents, "blocks": blocks.entries, "tensors": entries}).encode()
    head = b"%s %d %d %s" % (_MAGIC, _VERSION, len(text), hashlib.sha256(text).hexdigest().encode())
    first = head.ljust(_HEAD_BYTES - 1) + b"\n" + text
    write_whole(path, [first, bytes(-len(first) % _ALIGN_BYTES), *blocks.pieces])


def read(path: str | os.PathLike[str], numbers: bool = True) -> tuple[dict[str, Any], list[Tensor]]:
    """What a file says, and its tensors, which depend on the file for as long as they are. Raises FormatError, OSError.

    Without their `numbers` tensors are as they look only: none of what they hold is read, or checked.
    """
    content = mapped(path)
    text, begin = _text(content)
    contents = fields.parsed("frozen function", text)
    if not isinstance(contents, dict):
        raise FormatError(f"expected an object in JSON, got {type(contents).__name__}")
    blocks = [_block(content, begin, entry, numbers) for entry in _list(contents, "blocks")]
    return contents, [_tensor(blocks, entry) for entry in _list(contents, "tensors")]


class _Blocks:
    """Memory of tensors, as it is to be written."""

    def __init__(self) -> None:
        self.pieces: list[bytes | memoryview] = []
        self.entries: list[tuple[int, int, int]] = []
        self._known: dict[tuple[int, int], int] = {}
        self._bytes = 0

    def entry(self, tensor: Tensor) -> tuple[int, str, list[int], list[int]]:
        dtype, plain = dtype_name(tensor.dtype), tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
        if not plain or tensor.device.type != "cpu" or dtype not in ITEM_BYTES:
            raise StepError(f"save_frozen: expected dense tensors on a CPU, got one of {tensor.dtype}, {tensor.layout}, {tensor.device}")
        where = tensor.data_ptr(), reach(tensor.shape, tensor.stride()) * ITEM_BYTES[dtype]
        if where not in self._known:
            self._known[where] = self._add(_bytes_of(tensor, where[1]))
        return self._known[where], dtype, list(tensor.shape), list(tensor.stride())

    def _add(self, piece: memoryview) -> int:
        self.entries.append((self._bytes, piece.nbytes, zlib.crc32(piece)))
        self.pieces += [piece, bytes(-piece.nbytes % _ALIGN_BYTES)]
        self._bytes += -(-piece.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return len(self.entries) - 1


def _bytes_of(tensor: Tensor, nbytes: int) -> memoryview:
    """The memory from a tensor's first element to its last."""
    flat = torch.as_strided(tensor.detach(), (nbytes // tensor.element_size(),), (1,)) if nbytes else torch.empty(0, dtype=tensor.dtype)
    return memoryview(flat.view(torch.uint8).numpy().data)


def _text(content: mmap.mmap) -> tuple[bytes, int]:
    """The text of a file, and where its blocks begin."""
    head = _HEAD.fullmatch(content[:_HEAD_BYTES])
    if head is None:
        raise FormatError("expected a file that `save_frozen` has written, got another, or the begin of one")
    if int(head[1]) != _VERSION:
        raise FormatError(f"expected version {_VERSION}, got {int(head[1])}: it is of another lowtide; save the function again")
    end = _HEAD_BYTES + int(head[2])
    text = content[_HEAD_BYTES:end]
    if len(text) != int(head[2]) or hashlib.sha256(text).hexdigest().encode() != head[3]:
        raise FormatError("expected the file as it was written, got one that was cut short or damaged: save the function again")
    return text, -(-end // _ALIGN_BYTES) * _ALIGN_BYTES


def _list(contents: dict[str, Any], field: str) -> Iterator[Any]:
    items = contents.get(field)
    return iter(items) if isinstance(items, list) else fields.refuse("frozen function", field, "a list", items)


def _block(content: mmap.mmap, begin: int, entry: Any, numbers: bool) -> Tensor:
    if not isinstance(entry, list) or len(entry) != 3 or any(type(each) is not int or each < 0 for each in entry):
        raise FormatError("expected a block as [offset, bytes, crc32]")
    offset, nbytes, check = entry
    if offset % _ALIGN_BYTES or begin + offset + nbytes > len(content):
        raise FormatError("expected the whole file, got one that was cut short: save the function again")
    piece = memoryview(content)[begin + offset : begin + offset + nbytes]
    if numbers and zlib.crc32(piece) != check:
        raise FormatError("expected the file as it was written, got one that was damaged: save the function again")
    return torch.from_numpy(np.frombuffer(piece, np.uint8))


def _tensor(blocks: Sequence[Tensor], entry: Any) -> Tensor:
    match entry:
        case [int(at), str(dtype), list(shape), list(stride)] if 0 <= at < len(blocks) and dtype in ITEM_BYTES and dtype != "scalar":
            sizes = [*shape, *stride]
        case _:
            raise FormatError("expected a tensor as [block, dtype, shape, strides]")
    if len(shape) != len(stride) or any(type(each) is not int or not 0 <= each < 2**40 for each in sizes):
        raise FormatError(f"expected shapes and strides as numbers of 0 or more, got {sizes}")
    if (nbytes := reach(shape, stride) * ITEM_BYTES[dtype]) != blocks[at].nbytes:
        raise FormatError(f"expected {blocks[at].nbytes} bytes of tensors in that block, got {nbytes}")
    flat = blocks[at].view(of_torch(dtype)) if blocks[at].nbytes else torch.empty(0, dtype=of_torch(dtype))
    return torch.as_strided(flat, shape, stride)


Result: TypeAlias = Callable[[Sequence[Any]], Any]
_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "list": list}
_MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict}


def said_of(result: Result, count: int) -> Any:
    """What a file says of a result with so many tensors. Raises StepError for one of other kinds of containers."""
    tensors = [object() for _ in range(count)]
    try:
        returned = result(tensors)
    except Exception as error:  # of a class of the caller's own, which takes tensors alone
        raise StepError(_REFUSED.format(type(error).__name__)) from error
    return _said(returned, {id(each): at for at, each in enumerate(tensors)})


def _said(item: Any, tensors: dict[int, int]) -> dict[str, Any]:
    if id(item) in tensors:
        return {"tensor": tensors[id(item)]}
    if type(item) in _PLAIN:
        return {"value": item}
    name = type(item).__name__
    if type(item) is _SEQUENCES.get(name):
        return {name: [_said(each, tensors) for each in item]}
    if type(item) is _MAPPINGS.get(name) and all(type(key) in (str, int) for key in item):
        return {name: [[key, _said(each, tensors)] for key, each in item.items()]}
    raise StepError(_REFUSED.format(type(item).__name__))


def result_of(structure: Any, count: int) -> Result:
    """The result that a file says, of so many tensors. Raises FormatError for what can be none."""
    try:
        rebuilt = _made(structure, list(range(count)))
    except RecursionError:
        raise FormatError("expected a result of a few containers, got one nested deeper than Python goes") from None
    return lambda tensors: rebuilt(tensors)


def _made(structure: Any, places: Sequence[int]) -> Result:
    match structure:
        case {"tensor": int(at), **more} if not more and at in places and type(at) is int:
            return lambda tensors: tensors[at]
        case {"value": value, **more} if not more and type(value) in _PLAIN:
            return lambda tensors: value
        case {"tuple": list(items), **more} if not more:
            parts = [_made(item, places) for item in items]
            return lambda tensors: tuple([part(tensors) for part in parts])
        case {"list": list(items), **more} if not more:
            parts = [_made(item, places) for item in items]
            return lambda tensors: [part(tensors) for part in parts]
        case {"dict": list(pairs), **more} | {"OrderedDict": list(pairs), **more} if not more and all(map(_is_pair, pairs)):
            kind, named = _MAPPINGS[next(iter(structure))], [(key, _made(item, places)) for key, item in pairs]
            return lambda tensors: kind([(key, part(tensors)) for key, part in named])
    raise FormatError(f"expected a result of tensors, plain values, tuples, lists and dictionaries, got {str(structure)[:80]}")


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (str, int)


_REFUSED = (
    "save_frozen: expected a result of tensors, plain values, tuples, lists and dictionaries, which a process without the model can make, "
    "got a {}: have a module around the model return one of these, such as `return self.model(ids).logits`"
)
