"""What a value is, as text and back: its layout, then the storage that it lies on.

    float32[3, 2] strides[1, 3] offset[1] version[1] on w          on a storage that is known already
    float32[1, 64, 112, 112] 3.06 MiB activation cpu               on a new storage, named as the value
    uint8[9] 2.00 KiB = 2048 B activation cuda:0 in block          on a new storage of another name, with its exact bytes

Strides are left out where they are a contiguous tensor's, offset (in elements) and version where they are 0, and exact bytes where they
are those of a dense tensor of that shape. Bytes shown for people must agree with the exact ones.
"""

from __future__ import annotations

import re
from functools import lru_cache

from lowtide.errors import FormatError
from lowtide.ir.graph import Kind, Storage, Value
from lowtide.ir.sizes import ITEM_BYTES, Size, contiguous_stride, product
from lowtide.ir.text.arguments import NAME
from lowtide.ir.text.sizes import canonical, parse_size, size_text

_DEVICE = r"\w+(?::\d{1,9})?"
_CLAUSE = re.compile(
    r"(?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?: strides\[(?P<stride>[^\]]*)\])?(?: offset\[(?P<offset>[^\]]*)\])?"
    rf"(?: version\[(?P<version>-?\d{{1,18}})\])? (?:on (?P<known>{NAME})"
    rf"|(?P<bytes>(?P<amount>.+?) (?P<unit>[KMG]i)?B(?: = (?P<exact>\d{{1,40}}) B)?) (?P<kind>\w+)"
    rf" (?P<device>{_DEVICE})(?: in (?P<name>{NAME}))?)"
)
_UNITS = (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10))


def layout_text(value: Value) -> str:
    """Dtype, shape, and what is not implied of strides, offset and version."""
    return _layout_text(value.dtype, value.shape, value.stride, value.offset, value.version)


def storage_text(value: Value) -> str:
    """Bytes, kind and device of the value's storage, and its name where it is another than the value's."""
    storage = value.storage
    text = _storage_text(storage.nbytes, _dense_bytes(value.dtype, value.shape), storage.kind, storage.device)
    return text if storage.name == value.name else f"{text} in {checked_name(storage.name)}"


def parse_value(name: str, clause: str, storages: dict[str, Storage]) -> Value:
    """The value of that name that a clause describes; a new storage is added to `storages`. Raises FormatError saying what was expected."""
    match = _CLAUSE.fullmatch(clause)
    if match is None:
        raise FormatError(f"expected what {name} is, such as 'float32[3] 12 B activation cpu' or 'float32[3] on x', got {clause[:200]!r}")
    dtype, shape, stride, offset = match["dtype"], _parse_sizes(match["shape"]), match["stride"], match["offset"]
    return Value(
        name,
        _known_storage(match["known"], storages) if match["known"] else _new_storage(name, match, dtype, shape, storages),
        dtype,
        shape,
        contiguous_stride(shape) if stride is None else _parse_sizes(stride),
        0 if offset is None else parse_size(offset),
        int(match["version"] or 0),
    )


def checked_name(name: str) -> str:
    """A name that text can hold. Raises FormatError for any other."""
    if not _NAME.fullmatch(name):
        raise FormatError(f"expected an identifier as the name of a value or storage, got {name!r}")
    return name


_NAME = re.compile(NAME)


@lru_cache(maxsize=65536)
def _layout_text(dtype: str, shape: tuple[Size, ...], stride: tuple[Size, ...], offset: Size, version: int) -> str:
    if not re.fullmatch(r"\w+", dtype):
        raise FormatError(f"expected the name of a dtype such as 'float32', got {dtype!r}")
    shape, stride = tuple(map(canonical, shape)), tuple(map(canonical, stride))
    text = f"{dtype}[{_sizes_text(shape)}]"
    if stride != contiguous_stride(shape):
        text += f" strides[{_sizes_text(stride)}]"
    if canonical(offset) != 0:
        text += f" offset[{size_text(offset)}]"
    return f"{text} version[{version}]" if version != 0 else text


@lru_cache(maxsize=65536)
def _storage_text(nbytes: Size, dense_bytes: Size | None, kind: Kind, device: str) -> str:
    if not re.fullmatch(_DEVICE, device):
        raise FormatError(f"expected a device such as 'cpu' or 'cuda:0', got {device!r}")
    return f"{_bytes_text(nbytes, dense_bytes)} {kind.value} {device}"


def _bytes_text(nbytes: Size, dense_bytes: Size | None) -> str:
    """Bytes for people, and exactly where that is not enough to know them."""
    nbytes = canonical(nbytes)
    if not isinstance(nbytes, int) or nbytes < 1024:
        return f"{size_text(nbytes)} B"
    unit, size = next((unit, size) for unit, size in _UNITS if nbytes >= size)
    exactly = "" if nbytes == dense_bytes else f" = {size_text(nbytes)} B"
    return f"{nbytes / size:.2f} {unit}B{exactly}"


def _dense_bytes(dtype: str, shape: tuple[Size, ...]) -> Size | None:
    """The bytes of a tensor without gaps, None for a dtype of unknown size."""
    return product(shape) * ITEM_BYTES[dtype] if dtype in ITEM_BYTES else None


def _known_storage(name: str, storages: dict[str, Storage]) -> Storage:
    if name not in storages:
        raise FormatError(f"expected the name of a storage introduced above, got {name!r}")
    return storages[name]


def _new_storage(value_name: str, match: re.Match[str], dtype: str, shape: tuple[Size, ...], storages: dict[str, Storage]) -> Storage:
    name = match["name"] or value_name
    if name in storages:
        raise FormatError(f"expected a new storage, got {name!r} for the second time: write 'on {name}' for another value on it")
    storages[name] = Storage(name, _parse_bytes(match, _dense_bytes(dtype, shape)), match["device"], _parse_kind(match["kind"]))
    return storages[name]


def _parse_bytes(match: re.Match[str], dense_bytes: Size | None) -> Size:
    nbytes = dense_bytes
    if match["exact"] is not None:
        nbytes = int(match["exact"])
    elif match["unit"] is None:
        nbytes = parse_size(match["amount"])
    if nbytes is None or _bytes_text(nbytes, dense_bytes) != match["bytes"]:
        expected = "the exact bytes" if nbytes is None else repr(_bytes_text(nbytes, dense_bytes))
        raise FormatError(f"expected {expected}, got {match['bytes']!r}: bytes for people and exact bytes must agree")
    return nbytes


def _parse_kind(text: str) -> Kind:
    try:
        return Kind(text)
    except ValueError as error:
        raise FormatError(f"expected a kind of storage, one of {', '.join(kind.value for kind in Kind)}; got {text!r}") from error


def _sizes_text(sizes: tuple[Size, ...]) -> str:
    return ", ".join(map(size_text, sizes))


@lru_cache(maxsize=65536)
def _parse_sizes(text: str) -> tuple[Size, ...]:
    """Sizes between commas, less those within parentheses, which belong to functions."""
    if not text:
        return ()
    pieces, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            pieces.append(text[start:at])
            start = at + 1
    return tuple(map(parse_size, [*pieces, text[start:]]))
