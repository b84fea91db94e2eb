"""Files that nobody should trust: damaged, cut short, of another version, or made to do harm."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lowtide
from lowtide.errors import BatchError, FormatError, StepError
from tests.saved.saved_nets import NETS

_HEAD_BYTES = 128
_HOSTILE = (
    "__import__('os').system('touch /tmp/x')", "x\n    raise SystemExit\n    #", "aten.set_.source_Tensor", "aten.from_file.default",
    "py.eval", "aten.resize_.default", "aten.__class__.__init__", "aten.max_pool2d_with_indices_backward.default", "os.system.default",
    "../../etc/passwd", "host.load", "fission.loop", "fuse.region", "prims.device_put.default", "aten.empty.memory_format", "é", "\0",
    "None", "-1", "0", "1", "7", "4611686018427387904", "99999999999999999999", "float64", "int64", "bool", "cuda:0", "meta", "True", "()",
    "(1, 1)", "1e309", "_",
)  # fmt: skip


def parts(whole: bytes) -> tuple[dict[str, Any], bytes]:
    """What a file says, and its blocks."""
    length = int(whole.split(b" ")[2])
    begin = -(-(_HEAD_BYTES + length) // 64) * 64
    return json.loads(whole[_HEAD_BYTES : _HEAD_BYTES + length]), whole[begin:]


def put_together(said: Any, blocks: bytes, version: int = 1) -> bytes:
    """A file that says so, with the checksum of who knows how to make one."""
    text = json.dumps(said).encode()
    head = f"lowtide.frozen {version} {len(text)} {hashlib.sha256(text).hexdigest()}".encode()
    first = head.ljust(_HEAD_BYTES - 1) + b"\n" + text
    return first + bytes(-len(first) % 64) + blocks


@pytest.fixture(scope="module", params=NETS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path, tuple[Any, ...]]:
    """A file's bytes, where others like it may go, and a batch."""
    torch.manual_seed(0)
    model, args = request.param()
    path = tmp_path_factory.mktemp("files") / "net.lowtide"
    lowtide.optimize(model.eval(), args, exact=False).save_frozen(path, *args)
    return path.read_bytes(), path, args


def refusal(content: bytes, path: Path, args: tuple[Any, ...]) -> str:
    """The sentence with which a file is refused; "" for one that is not, which has run then."""
    path.write_bytes(content)
    try:
        loaded = lowtide.load_frozen(path)
    except (FormatError, StepError) as error:
        return str(error)
    with suppress(BatchError):  # for a batch of another shape
        loaded(*args)
    return ""


def refused(content: bytes, path: Path, args: tuple[Any, ...]) -> bool:
    """Whether a file is refused, with a sentence."""
    sentence = refusal(content, path, args)
    assert "expected" in sentence or not sentence
    assert str(path) in sentence or "load_frozen" in sentence or not sentence
    return bool(sentence)


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.lowtide"):
        lowtide.load_frozen(tmp_path / "nothing.lowtide")
    with pytest.raises(IsADirectoryError):
        lowtide.load_frozen(tmp_path)


@pytest.mark.parametrize("content", [b"", b"x", b"lowtide.frozen 1 ", b"PK\x03\x04" + bytes(300), b"\x80\x04N." * 90])
def test_another_file_is_said_to_be_another(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(FormatError, match="expected a file that `save_frozen` has written"):
        lowtide.load_frozen(tmp_path / "other")


def test_another_version_is_told(saved: tuple[bytes, Path, tuple[Any, ...]]) -> None:
    whole, path, _ = saved
    path.write_bytes(put_together(*parts(whole), version=2))
    with pytest.raises(FormatError, match="expected version 1, got 2: it is of another lowtide; save the function again"):
        lowtide.load_frozen(path)


def test_a_file_that_is_put_together_again_is_read(saved: tuple[bytes, Path, tuple[Any, ...]]) -> None:
    whole, path, args = saved
    assert put_together(*parts(whole)) == whole
    assert not refused(put_together(*parts(whole)), path, args)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_file_that_is_cut_short_or_damaged_is_refused(saved: tuple[bytes, Path, tuple[Any, ...]], data: st.DataObject) -> None:
    whole, path, args = saved
    said, blocks = parts(whole)
    end = len(whole) - len(blocks) + max(offset + nbytes for offset, nbytes, _ in said["blocks"])
    assert refused(whole[: data.draw(st.integers(0, end - 1))], path, args)
    used = [(len(whole) - len(blocks) + offset, nbytes) for offset, nbytes, _ in said["blocks"] if nbytes]
    spans = [(0, _HEAD_BYTES - 40), (_HEAD_BYTES, int(whole.split(b" ")[2])), *used]
    begin, length = data.draw(st.sampled_from(spans))
    at = begin + data.draw(st.integers(0, length - 1))
    flipped = bytes([whole[at] ^ (1 << data.draw(st.integers(0, 7)))])
    assert refused(whole[:at] + flipped + whole[at + 1 :], path, args)


def places(item: Any, set_to: Callable[[Any], None]) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """Everything within a JSON text, with what puts another in its place."""
    yield item, set_to
    keys = item if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
    for key in keys:
        yield from places(item[key], lambda new, key=key: item.__setitem__(key, new))  # type: ignore[misc]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_changed_text_is_refused_or_harmless(saved: tuple[bytes, Path, tuple[Any, ...]], data: st.DataObject) -> None:
    """Whoever changes a file also writes the checksum that belongs to it."""
    whole, path, args = saved
    said, blocks = parts(whole)
    for _ in range(data.draw(st.integers(1, 2))):
        found = [(item, put) for item, put in places(said, lambda new: None) if item is not said]
        item, put = data.draw(st.sampled_from(found))
        new: Any = data.draw(st.sampled_from(_HOSTILE))
        if isinstance(item, str) and data.draw(st.booleans()):
            new = changed(item, new, data)
        elif isinstance(item, int):
            new = data.draw(st.sampled_from([item + 1, item - 1, 0, -1, 2**31, 2**62, new, None, 0.5]))
        put(new)
    refused(put_together(said, blocks), path, args)


def changed(line: str, new: str, data: st.DataObject) -> str:
    """A line in which one word or number is another."""
    words = list(re.finditer(r"[\w.]+", line))
    if not words:
        return new
    word = data.draw(st.sampled_from(words))
    if word[0].isdigit():
        new = data.draw(st.sampled_from([str(int(word[0]) + 1), str(max(0, int(word[0]) - 1)), str(2 * int(word[0])), new]))
    return line[: word.start()] + new + line[word.end() :]
