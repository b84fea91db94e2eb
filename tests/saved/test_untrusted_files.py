"""Files that nobody should trust: damaged, cut short, of another version, or made to do harm."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
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
from tests.saved.saved_nets import NETS, between, words

_HEAD_BYTES = 128
_HOSTILE = (
    "__import__('os').system('touch x')", "x\n    raise SystemExit\n    #", "aten.set_.source_Tensor", "aten.from_file.default",
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


def told(whole: bytes, old: str, new: str, count: int = 0) -> bytes:
    """A file in whose text something is another, everywhere or at the first places."""
    said, blocks = parts(whole)
    text = json.dumps(said["graph"])
    quoted = json.dumps(old)[1:-1]
    assert quoted in text
    said["graph"] = json.loads(text.replace(quoted, json.dumps(new)[1:-1], count or -1))
    return put_together(said, blocks)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path, tuple[Any, ...]]:
    """A convolution, and cumsum by torch, and a product."""
    torch.manual_seed(0)
    model, args = between()
    path = tmp_path_factory.mktemp("small") / "net.lowtide"
    lowtide.optimize(model.eval(), args, exact=False).save_frozen(path, *args)
    return path.read_bytes(), path, args


LIES = [
    # A weight, a batch and a result larger than they are: kernels would read and write past their ends.
    ("float32[8, 3, 3, 3] 864 B", "float32[16, 3, 3, 3] 1.69 KiB", "expected"),
    ("float32[1, 3, 6, 6] 432 B", "float32[1, 3, 60, 60] 42.19 KiB", "expected"),
    ("float32[1, 8, 6, 6] 1.12 KiB", "float32[1, 8, 12, 6] 2.25 KiB", "expected a result of shape (1, 8, 6, 6)"),
    ("(1, 1), (1, 1), (1, 1), False", "(1, 1), (100, 100), (1, 1), False", "expected a result of shape (1, 8, 204, 204)"),
    ("(1, 1), (1, 1), (1, 1), False", "(0, 1), (1, 1), (1, 1), False", "expected a window that moves"),
    # What torch makes is of another shape than is said, and read by a kernel.
    ("aten.cumsum.default(relu, 2)", "aten.sum.default(relu)", "expected"),
    # Operators that do more than compute, or that are none.
    ("aten.cumsum.default(relu, 2)", "aten.set_.source_Tensor(relu, relu)", "expected an operator that only computes"),
    ("aten.cumsum.default(relu, 2)", 'aten.from_file.default("/etc/passwd")', "expected an operator that only computes"),
    ("aten.cumsum.default(relu, 2)", "aten.empty_like.default(relu)", "expected an operator that only computes"),
    ("aten.cumsum.default(relu, 2)", "aten.__class__.__call__(relu, 2)", "expected an operator"),
    ("aten.cumsum.default(relu, 2)", "prims.cumsum.default(relu, 2)", "expected an operator"),
    ("aten.cumsum.default(relu, 2)", "os.system.default(relu, 2)", "expected an operator"),
    ("aten.relu.default", "aten.cumsum.default", "expected"),
    ("cumsum.default(relu, 2)", "cumsum.default(relu, dim=2, dtype=dtype(\"load\"))", "expected a CPU, a dtype"),
    # A constant that is the batch, so that it would never be read again.
    ("fixed=(1, 2,", "fixed=(0, 2,", "expected"),
]  # fmt: skip


UNLIKE = ("_first_weight", "_norm_weight")  # of [8, 3, 3, 3], and of [8], beside [1, 8, 6, 6]


@pytest.mark.parametrize(("old", "new", "expected"), LIES)
def test_lies_are_refused(old: str, new: str, expected: str, small: tuple[bytes, Path, tuple[Any, ...]]) -> None:
    whole, path, args = small
    assert expected in refusal(told(whole, old, new), path, args)


def test_lies_are_refused_where_assertions_are_off(small: tuple[bytes, Path, tuple[Any, ...]]) -> None:
    """Under `python -O` no check of what a file says is gone. Of a shape that does not broadcast kernels would read past a buffer."""
    whole, path, _ = small
    files = [told(whole, old, new) for old, new, _ in LIES[:6]]
    files += [told(whole, "aten.relu.default(native_batch_norm)", f"aten.add.Tensor(native_batch_norm, {other})") for other in UNLIKE]
    for at, content in enumerate(files):
        path.with_name(f"{at}.lowtide").write_bytes(content)
    script = """
import sys, lowtide
assert False, "assertions are on"
for path in sys.argv[1:]:
    try:
        lowtide.load_frozen(path)
    except (lowtide.errors.FormatError, lowtide.errors.StepError):
        continue
    print("accepted:", path)
print("done")
"""
    names = [str(path.with_name(f"{at}.lowtide")) for at in range(len(files))]
    ran = subprocess.run([sys.executable, "-O", "-c", script, *names], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.returncode) == ("done\n", 0), ran.stdout + ran.stderr


def test_strides_that_lie_are_refused_before_anything_is_made(small: tuple[bytes, Path, tuple[Any, ...]]) -> None:
    """A batch of a few bytes is said to reach over more memory than there is: it is compared with the graph, and never made."""
    whole, path, args = small
    said, blocks = parts(whole)
    for place in range(2, 4):
        said["batch"][0][1]["stride"] = [2**30 if at == place else step for at, step in enumerate([108, 36, 6, 1])]
        assert "expected a batch as the graph says" in refusal(put_together(said, blocks), path, args)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("strides[288, 8, 48, 1] offset[32] on addmm", "strides[288, 8, 0, 1] offset[32] on addmm"),
        ("strides[288, 8, 48, 1] offset[32] on addmm", "strides[288, 8, 48, 1] offset[31] on addmm"),
        ("strides[96, 8, 16, 1]", "strides[96, 8, 17, 1]"),
    ],
)
def test_strides_within_a_region_are_looked_at(old: str, new: str, attention: tuple[bytes, Path, tuple[Any, ...]]) -> None:
    whole, path, args = attention
    assert not refused(whole, path, args)
    assert "expected" in refusal(told(whole, old, new), path, args)


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path, tuple[Any, ...]]:
    torch.manual_seed(0)
    model, args = words()
    path = tmp_path_factory.mktemp("words") / "net.lowtide"
    lowtide.optimize(model.eval(), args, exact=False).save_frozen(path, *args)
    return path.read_bytes(), path, args


def test_what_is_said_of_batch_and_weights_is_what_the_graph_says(small: tuple[bytes, Path, tuple[Any, ...]]) -> None:
    whole, path, args = small
    said, blocks = parts(whole)
    said["batch"][0][1]["shape"][2] = 60
    assert "as the graph says" in refusal(put_together(said, blocks), path, args)
    said["batch"][0][1]["shape"] = [2**31 - 1] * 4
    assert "expected" in refusal(put_together(said, blocks), path, args)
    said, blocks = parts(whole)
    said["tensors"][0], said["tensors"][1] = said["tensors"][1], said["tensors"][0]
    assert "as the graph says" in refusal(put_together(said, blocks), path, args)


def test_other_offsets_are_other_places_and_overlaps_are_not_used(small: tuple[bytes, Path, tuple[Any, ...]]) -> None:
    whole, path, args = small
    loaded = []
    for change in (lambda each: each, lambda each: [0] * len(each), lambda each: [64 * 2**20 + offset for offset in each], lambda each: []):
        said, blocks = parts(whole)
        said["offsets"] = [change(each) for each in said["offsets"]]
        path.write_bytes(put_together(said, blocks))
        loaded.append(lowtide.load_frozen(path)(*args)["all"])
    assert all(torch.equal(each, loaded[0]) for each in loaded)


def test_where_a_node_comes_from_is_not_executed(small: tuple[bytes, Path, tuple[Any, ...]]) -> None:
    whole, path, args = small
    source = '; at "net.py":7 in "head\\n    raise SystemExit\\n    #"'
    said, blocks = parts(whole)
    said["graph"] = [line + source if "aten.cumsum" in line else line for line in said["graph"]]
    assert not refused(put_together(said, blocks), path, args)


def places(item: Any, set_to: Callable[[Any], None]) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """Everything within a JSON text, with what puts another in its place."""
    yield item, set_to
    keys = item if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
    for key in keys:
        yield from places(item[key], lambda new, key=key: item.__setitem__(key, new))  # type: ignore[misc]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
