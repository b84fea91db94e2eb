import errno
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.base import files
from lowtide.cost import cache
from lowtide.cost.cache import Cache

CACHE = Cache("workspaces", ("torch 2", "a processor"))


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "_warned", set())
    monkeypatch.setattr(files, "_given_up", set())
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "new"))
    return tmp_path / "new"


def test_nothing_is_known_at_first():
    assert CACHE.load() == {}
    assert not CACHE.path.exists()


def test_what_is_merged_is_loaded(root: Path):
    assert CACHE.merge({"a": 1, "b": 2}) == {"a": 1, "b": 2}
    assert CACHE.merge({"b": 3, "c": 4}) == {"a": 1, "b": 2, "c": 4}  # the first number stays
    assert CACHE.load() == {"a": 1, "b": 2, "c": 4}
    assert CACHE.path.parent == root
    assert not list(root.glob("*.part"))


@settings(max_examples=10, deadline=None)
@given(st.lists(st.dictionaries(st.text(), st.integers(0, 2**60)), max_size=4), st.uuids())
def test_any_keys_come_back(parts: list[dict[str, int]], kind: object):
    kept = Cache("any", (str(kind),))
    kept.path.unlink(missing_ok=True)
    expected: dict[str, int] = {}
    for part in parts:
        expected = part | expected
        kept.merge(part)
    assert kept.load() == expected


def test_kinds_and_circumstances_are_kept_apart():
    CACHE.merge({"a": 1})
    assert Cache("times", CACHE.circumstances).load() == {}
    assert Cache(CACHE.kind, ("torch 3", "a processor")).load() == {}
    assert Cache(CACHE.kind, ("torch 2a", " processor")).load() == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        '{"format": 1, "entr',
        "[]",
        "\x00",
        '{"format": 1}',
        '{"format": 1, "kind": "workspaces", "circumstances": ["torch 2", "another"], "entries": {}}',
        '{"format": 2, "kind": "workspaces", "circumstances": ["torch 2", "a processor"], "entries": {}}',
        '{"format": 1, "kind": "workspaces", "circumstances": ["torch 2", "a processor"], "entries": {"a": -1}}',
        '{"format": 1, "kind": "workspaces", "circumstances": ["torch 2", "a processor"], "entries": {"a": true}}',
        '{"format": 1, "kind": "workspaces", "circumstances": ["torch 2", "a processor"], "entries": {"a": NaN}}',
        '{"format": 1, "kind": "workspaces", "circumstances": ["torch 2", "a processor"], "entries": {"a": Infinity}}',
        '{"format": 1, "kind": "workspaces", "circumstances": ["torch 2", "a processor"], "entries": {"a": 1.5}}',
        '{"format": 1, "kind": "workspaces", "circumstances": ["torch 2", "a processor"], "entries": {"a": 9999999999999999999999}}',
        '{"format": 1, "kind": "workspaces", "circumstances": ["torch 2", "a processor"], "entries": {"a": 1' + "0" * 5000 + "}}",
        '{"format": 1, "kind": "workspaces", "circumstances": ["torch 2", "a processor"], "entries": {"a": 1e400}}',
        '{"format": 1, "kind": "workspaces", "circumstances": ["torch 2", "a processor"], "entries": {"a": null}}',
        '{"format": 1, "kind": "workspaces", "circumstances": ["torch 2", "a processor"], "entries": [1]}',
        '{"a":' * 5000,
        '{"format": 1, "kind": "workspaces", "circumstances": ["torch 2", "a processor"], "entries": {"a": "__import__(\'os\')"}}',
    ],
)
def test_a_file_that_does_not_read_is_built_anew(root: Path, text: str):
    root.mkdir()
    CACHE.path.write_text(text)
    with pytest.warns(RuntimeWarning, match="does not read"):
        assert CACHE.load() == {}
    assert CACHE.merge({"a": 1}) == {"a": 1}  # a second warning would be an error
    assert CACHE.load() == {"a": 1}


def test_a_file_that_is_no_text_is_built_anew(root: Path):
    root.mkdir()
    CACHE.path.write_bytes(b"\xff\xfe\x80")
    with pytest.warns(RuntimeWarning, match="does not read"):
        assert CACHE.load() == {}


def test_a_directory_that_cannot_be_written_costs_a_warning(root: Path):
    root.write_text("a file in the directory's place")
    with pytest.warns(RuntimeWarning, match="set LOWTIDE_CACHE"):
        assert CACHE.merge({"a": 1}) == {"a": 1}


def test_a_failing_write_leaves_the_old_file(root: Path, monkeypatch: pytest.MonkeyPatch):
    CACHE.merge({"a": 1})

    def refuse(source: str, target: str) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.warns(RuntimeWarning, match="disk full"):
        assert CACHE.merge({"b": 2}) == {"a": 1, "b": 2}
    assert CACHE.load() == {"a": 1}
    assert not list(root.glob("*.part"))


def _merge_many(name: str) -> None:
    for number in range(20):
        CACHE.merge({f"{name}{number}": number})


def test_processes_that_write_at_once_lose_nothing():
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_merge_many, args=(name,)) for name in ("a", "b")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert CACHE.load() == {f"{name}{number}": number for name in ("a", "b") for number in range(20)}


def _merge_until_killed(ready: object) -> None:
    number = 0
    while True:
        CACHE.merge({f"key {number}": number})
        number += 1
        if number == 5:
            ready.set()  # type: ignore[attr-defined]


def test_killing_a_writer_leaves_a_file_that_reads():
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    writer = context.Process(target=_merge_until_killed, args=(ready,))
    writer.start()
    assert ready.wait(60)
    writer.kill()
    writer.join()
    found = CACHE.load()  # a warning would be an error
    assert len(found) >= 5
    assert found == {f"key {number}": number for number in range(len(found))}
    assert CACHE.merge({"more": 1}) == found | {"more": 1}  # the lock went with its holder


def test_numbers_out_of_bounds_are_not_believed(root: Path):
    kept = Cache("bounded", ("x",), least=1, most=10)
    kept.merge({"a": 1, "b": 10})
    assert kept.load() == {"a": 1, "b": 10}
    for wrong in (0, 11):
        Cache("bounded", ("x",)).merge({"c": wrong})
        files._warned.clear()
        with pytest.warns(RuntimeWarning, match="a whole number from 1 to 10"):
            assert kept.load() == {}
        kept.path.unlink()


def test_a_file_is_checked_once_as_it_stands():
    checked = []
    kept = Cache("texts", ("x",), parse=checked.append)
    kept.merge({"a": "one", "b": "two"})
    for _ in range(3):
        assert kept.load() == {"a": "one", "b": "two"}
    assert checked == ["one", "two"]
    kept.load()["a"] = "mine"
    assert kept.load() == {"a": "one", "b": "two"}
    text = kept.path.read_text()
    kept.path.write_text(text.replace("two", "three"))
    assert kept.load() == {"a": "one", "b": "three"}
    kept.path.unlink()
    assert kept.load() == {}


def test_the_file_is_json_that_says_what_it_holds():
    CACHE.merge({"b": 2, "a": 1})
    document = json.loads(CACHE.path.read_text())
    assert document == {"format": 1, "kind": "workspaces", "circumstances": ["torch 2", "a processor"], "entries": {"a": 1, "b": 2}}


def _bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, tempfile.TemporaryDirectory() as short:  # names of sockets are short
        made.bind(f"{short}/s")
        os.replace(f"{short}/s", path)


_IN_THE_FILES_PLACE = {
    "FIFO": os.mkfifo,
    "folder": os.mkdir,
    "link to itself": lambda path: path.symlink_to(path),
    "link to a device": lambda path: path.symlink_to("/dev/full"),
    "socket": _bind,
}


@pytest.mark.skipif(sys.platform == "win32", reason="for systems with FIFOs")
@pytest.mark.parametrize("suffix", [".json", ".lock"])
@pytest.mark.parametrize("kind", _IN_THE_FILES_PLACE)
def test_what_is_no_file_in_a_files_place_is_said_and_not_waited_for(root: Path, suffix: str, kind: str):
    root.mkdir()
    _IN_THE_FILES_PLACE[kind](CACHE.path.with_suffix(suffix))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert CACHE.load() == {}
        assert CACHE.merge({"a": 1}) == {"a": 1}
        assert CACHE.merge({"b": 1}) == {"b": 1}
    assert all("does not read" in str(each.message) or "cannot keep" in str(each.message) for each in told)
    assert 1 <= len(told) <= 2  # that it does not read, and that it cannot be written


@pytest.mark.skipif(sys.platform == "win32", reason="there are no locks on Windows")
def test_a_lock_that_another_process_keeps_is_waited_for_once_and_not_for_ever(root: Path, monkeypatch: pytest.MonkeyPatch):
    CACHE.merge({"a": 1})
    source = "import fcntl, sys, time; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); time.sleep(1000)"
    holder = subprocess.Popen([sys.executable, "-c", source, str(CACHE.path.with_suffix(".lock"))], stdout=subprocess.PIPE)
    pauses: list[float] = []
    monkeypatch.setattr(files, "_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(files.time, "sleep", lambda seconds, sleep=time.sleep: (pauses.append(seconds), sleep(seconds)))
    try:
        holder.stdout.readline()
        with pytest.warns(RuntimeWarning, match="another process has held this lock for 0.2 seconds"):
            assert CACHE.merge({"b": 2}) == {"a": 1, "b": 2}
        assert pauses
        pauses.clear()
        assert CACHE.merge({"c": 3}) == {"a": 1, "c": 3}
        assert not pauses
    finally:
        holder.kill()
        holder.communicate()
    assert CACHE.merge({"d": 4}) == {"a": 1, "d": 4} == CACHE.load()


@pytest.mark.skipif(sys.platform == "win32", reason="there are no locks on Windows")
def test_a_file_system_without_locks_does_without(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    assert CACHE.merge({"a": 1}) == {"a": 1} == CACHE.load()


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")
def test_a_child_that_is_forked_meanwhile_does_not_keep_the_lock(root: Path, monkeypatch: pytest.MonkeyPatch):
    CACHE.merge({"a": 1})
    monkeypatch.setattr(files, "_PATIENCE_SECONDS", 0.0)
    source = """if True:
        import os, sys, time
        from pathlib import Path
        from lowtide.base.files import locked
        with locked(Path(sys.argv[1])):
            child = os.fork()
            if not child:
                time.sleep(1000)
        print(child, flush=True)
    """
    lock = CACHE.path.with_suffix(".lock")
    with subprocess.Popen([sys.executable, "-c", source, str(lock)], stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        try:
            assert CACHE.merge({"b": 2}) == {"a": 1, "b": 2}
        finally:
            os.kill(child, 9)


def test_without_a_place_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "directory", lambda: None)
    assert CACHE.load() == {}
    assert CACHE.merge({"a": 1}) == {"a": 1}
    assert CACHE.path is None
