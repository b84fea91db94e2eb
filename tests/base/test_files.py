"""Files: regular ones whole or as they were, others straight, nothing for ever."""

import errno
import os
import re
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lowtide.base import files
from lowtide.base.files import check_writable, mapped, read_bytes, read_utf8, write_whole
from lowtide.errors import FormatError

AS_ROOT = os.geteuid() == 0


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("mode", [0o640, 0o600, 0o444 if AS_ROOT else 0o644, 0o755])
def test_a_file_that_is_written_anew_keeps_its_mode(tmp_path: Path, mode: int):
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(mode)
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert names(tmp_path) == {"plan.json"}


def test_a_new_file_has_the_mode_that_the_process_gives_new_files(tmp_path: Path):
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "plan.json", b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "plan.json").stat().st_mode) == 0o640


@pytest.mark.skipif(not AS_ROOT, reason="only root gives files away")
def test_the_owner_stays(tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_text("old")
    os.chown(path, 1234, 4321)
    write_whole(path, "new")
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 4321)


def test_a_link_is_followed_to_its_file(tmp_path: Path):
    target, link, loose = tmp_path / "deep" / "target", tmp_path / "link", tmp_path / "loose"
    target.parent.mkdir()
    target.write_text("old")
    link.symlink_to("deep/target")
    loose.symlink_to("deep/new")
    write_whole(link, "new")
    write_whole(loose, "made")
    assert link.is_symlink()
    assert loose.is_symlink()
    assert target.read_text() == "new"
    assert (tmp_path / "deep" / "new").read_text() == "made"


def test_a_device_is_written_and_stays_a_device(tmp_path: Path):
    link = tmp_path / "link"
    link.symlink_to("/dev/null")
    for path in (Path("/dev/null"), link):
        check_writable(path)
        write_whole(path, "gone")
        assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
        assert read_bytes(path) == b""
    assert link.is_symlink()


def test_a_full_device_is_an_error_that_names_it():
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_whole("/dev/full", "content")


def test_a_fifo_is_written_where_somebody_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    content = "x" * 500_000  # more than a pipe holds
    with pytest.raises(OSError, match="nobody reads this FIFO"):
        write_whole(path, content)
    reader, read = os.open(path, os.O_RDWR), bytearray()

    def take() -> None:
        while len(read) < len(content):
            read.extend(os.read(reader, 1000))

    thread = threading.Thread(target=take)
    thread.start()
    write_whole(path, content)
    thread.join(60)
    assert read == content.encode()
    monkeypatch.setattr(files, "_SILENT_SECONDS", 0.01)
    with pytest.raises(OSError, match=r"took nothing for 0\.01 seconds"):
        write_whole(path, content)
    os.close(reader)
    assert path.is_fifo()


def test_a_fifo_is_read_while_somebody_writes_it(tmp_path: Path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    thread = threading.Thread(target=lambda: path.write_text("x" * 500_000))
    thread.start()
    assert read_utf8(path) == "x" * 500_000
    thread.join(60)


def test_a_fifo_that_nobody_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    monkeypatch.setattr(files, "_NO_WRITER_SECONDS", 0.01)
    monkeypatch.setattr(files, "_SILENT_SECONDS", 0.01)
    with pytest.raises(OSError, match="nobody writes to it: write a regular file first"):
        read_bytes(path)
    writer = os.open(path, os.O_RDWR)
    with pytest.raises(OSError, match=r"nothing came for 0\.01 seconds"):
        read_bytes(path)
    os.close(writer)
    with pytest.raises(OSError, match="expected a regular file, got a FIFO"):
        read_bytes(path, regular=True)
    with pytest.raises(OSError, match="expected a regular file, got a FIFO"):
        write_whole(path, "content", regular=True)


def test_what_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "_MOST_BYTES", 2**20)
    with pytest.raises(OSError, match="expected at most 1,048,576 bytes"):
        read_bytes("/dev/zero")


def test_text_is_utf8_with_plain_line_ends(tmp_path: Path):
    path = tmp_path / "text"
    path.write_bytes("ä\r\nb\rc\n".encode())
    assert read_utf8(path) == "ä\nb\nc\n"
    path.write_bytes(b"\xff")
    with pytest.raises(FormatError, match="expected text in UTF-8"):
        read_utf8(path)


def test_a_folder_is_refused(tmp_path: Path):
    for function in (read_bytes, check_writable, lambda path: write_whole(path, "")):
        with pytest.raises(IsADirectoryError) as refused:
            function(tmp_path)
        assert refused.value.filename == str(tmp_path)


@pytest.mark.parametrize("function", [read_bytes, mapped])
def test_a_folder_that_is_refused_is_not_left_open(tmp_path: Path, function: Callable[[Path], object]):
    os.close(free := os.dup(0))
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
        function(tmp_path)
    os.close(now := os.dup(0))
    assert now == free


def test_an_error_names_the_path_that_was_given_and_leaves_no_draft(tmp_path: Path):
    path = tmp_path / "missing" / "plan.json"
    for function in (read_bytes, check_writable, lambda path: write_whole(path, "")):
        with pytest.raises(FileNotFoundError) as refused:
            function(path)
        assert refused.value.filename == str(path)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException):
    def fail(descriptor: int, content: bytes) -> None:
        os.write(descriptor, content[:1])
        raise error

    path = tmp_path / "plan.json"
    path.write_text("old")
    monkeypatch.setattr(files, "_write", fail)
    with pytest.raises(type(error)):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == {"plan.json"}


@pytest.mark.parametrize("refused", ["open", "replace"])
def test_a_file_in_a_folder_that_takes_no_draft_is_written_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str):
    # As in a container with one mounted file, or a folder of somebody else's.
    path, real = tmp_path / "plan.json", getattr(os, refused)
    path.write_text("old and longer")

    def refusing(name, *args, **kwargs):
        if Path(name) != path:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), os.fspath(name))
        return real(name, *args, **kwargs)

    monkeypatch.setattr(os, refused, refusing)
    write_whole(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "new"
    assert names(tmp_path) == {"plan.json"}


def test_a_long_name_can_be_written(tmp_path: Path):
    write_whole(tmp_path / ("n" * 255), "content")
    assert names(tmp_path) == {"n" * 255}


def test_the_file_behind_standard_output_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    print("before")
    check_writable("/dev/stdout")
    write_whole("/dev/stdout", "content\n")
    print("after")
    assert capfd.readouterr().out == "before\ncontent\nafter\n"
