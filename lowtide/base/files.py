"""The one place where files are written and read: a file is whole or what it was before, and nothing waits for ever.

**Written.** A regular file is replaced at once by a draft beside it, so that it is never there by half. Links are followed to the file that
they name; mode, owner and group stay where the system lets them. A name that is one of several hard links leaves the others with the old
content. Where the folder takes no draft (it cannot be written, or the file is a mount of its own) the file itself is written, and only
there can a failure leave it cut short. What is no regular file is written straight, never replaced: a terminal, `/dev/null`, a FIFO that
somebody reads. Block devices and FIFOs without a reader are refused.

**Read.** A regular file at once; a pipe, FIFO or terminal as long as something comes, with limits to silence and to bytes. A pipe or FIFO
that is written has the same limit to silence, but where it is standard output.

**Locked.** Between processes and threads, with a limit to the wait, and without where the file system knows no locks.

**Kept.** In a folder of its own lowtide keeps what it can make again: measurements, compiled kernels, the planned allocator.
$LOWTIDE_CACHE is taken at its word. Else it is `lowtide` in $XDG_CACHE_HOME or in ~/.cache, where that can be written; else a folder of
this user alone beside the system's temporary files; else there is none. Whatever such a folder lacks costs a warning, once, and seconds.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import select
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from lowtide.base.messages import warn
from lowtide.errors import FormatError

_MOST_BYTES = 2**30  # of a file that is read: a plan of a million operators has a quarter of that
_CHUNK_BYTES = 2**20
_NO_WRITER_SECONDS = 5.0  # for somebody to open the other end of a FIFO
_SILENT_SECONDS = 60.0  # for a program at the other end to say something
_CLOSED_FOLDER = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY}  # a draft cannot be made there, or not take the file's place

_PathLike = str | os.PathLike[str]
_Pieces: TypeAlias = bytes | Sequence[bytes | memoryview]
Content: TypeAlias = str | _Pieces
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_warned: set[str] = set()  # what this process has been warned of


def write_whole(path: _PathLike, content: Content, *, regular: bool = False) -> None:
    """Write text, bytes or pieces to `path`, as told above; `regular`: only to a regular file. Raises OSError, which names `path`."""
    content = content.encode() if isinstance(content, str) else content
    with _naming(path):
        status = _stat(path)
        if status is not None and not stat.S_ISREG(status.st_mode):
            _check_can_be_written_straight(status, regular)
            _write_straight(path, status, content)
        elif status is not None and _is_open_for_output(status) is not None:
            _write_straight(path, status, content)
        else:
            _replace(Path(os.path.realpath(path)), status, content)


def check_writable(path: _PathLike) -> None:
    """Raise now what `write_whole` would raise later, as far as that can be told without a trace. Raises OSError, which names `path`."""
    with _naming(path):
        status, target = _stat(path), Path(os.path.realpath(path))
        if status is None:
            if not target.parent.is_dir():
                raise OSError(errno.ENOENT, f"{os.strerror(errno.ENOENT)}: {os.path.dirname(os.fspath(path)) or target.parent}")
            if not os.access(target.parent, os.W_OK | os.X_OK):
                raise OSError(errno.EACCES, "the folder cannot be written")
        elif not stat.S_ISREG(status.st_mode):
            _check_can_be_written_straight(status)
        elif _is_open_for_output(status) is None:
            _check_may_be_written(target)


def read_bytes(path: _PathLike, *, regular: bool = False) -> bytes:
    """What a file holds; `regular`: anything but a regular file is refused at once, not waited for. Raises OSError, which names `path`."""
    with _opened(path) as (file, status):
        if stat.S_ISREG(status.st_mode):
            return _limited(iter(lambda: file.read(_CHUNK_BYTES), b""))
        if regular or stat.S_ISBLK(status.st_mode):
            _refuse_kind(status)
        return _limited(_arriving(file.fileno()))


def mapped(path: _PathLike) -> mmap.mmap:
    """A regular file's bytes, as they are read; who writes to them writes to a copy. Raises OSError, which names `path`.

    Whoever holds it depends on the file: one that is cut short meanwhile ends the process.
    """
    with _opened(path) as (file, status):
        if not stat.S_ISREG(status.st_mode):
            _refuse_kind(status)
        return mmap.mmap(file.fileno() if status.st_size else -1, status.st_size or 1, access=mmap.ACCESS_COPY)


def read_utf8(path: _PathLike, *, regular: bool = False) -> str:
    """The text of a file, its lines ended by "\\n". Raises FormatError where it is not UTF-8, OSError where it cannot be read."""
    try:
        text = read_bytes(path, regular=regular).decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{os.fspath(path)}: expected text in UTF-8: {error}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


@cache
def template(path: Path) -> Any:
    """A page as jinja2 fills it in, what it includes lies beside it; whatever it is given is escaped, but in C."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # only those who want a page wait for it

    loader = FileSystemLoader(path.parent, encoding="utf-8")
    pages = Environment(loader=loader, autoescape=path.suffix != ".h", undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return pages.get_template(path.name)


# A FIFO does not hold an open up, a terminal does not become this process's own.
_WITHOUT_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)


@contextmanager
def _naming(path: _PathLike) -> Iterator[None]:
    """Errors name the path that the caller gave, not a draft or where a link leads."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


@contextmanager
def _opened(path: _PathLike) -> Iterator[tuple[FileIO, os.stat_result]]:
    """A file to be read, which is no folder: Python refuses those."""
    with _naming(path), FileIO(path, opener=lambda path, flags: os.open(path, flags | _WITHOUT_WAITING)) as file:
        yield file, os.fstat(file.fileno())


def _stat(path: _PathLike) -> os.stat_result | None:
    """What stands at the end of the links; None where nothing does."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _is_open_for_output(status: os.stat_result) -> int | None:
    """The descriptor of standard output or error, where it is this very file: then all that is said there goes on where the last ended."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(status, os.fstat(descriptor)):
                return descriptor
    return None


def _check_can_be_written_straight(status: os.stat_result, regular: bool = False) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, "expected a file, got a folder")
    if regular or stat.S_ISBLK(status.st_mode):
        _refuse_kind(status)


def _check_may_be_written(target: Path) -> None:
    """A file that is marked as not to be written is not replaced either."""
    if not os.access(target, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def _replace(target: Path, status: os.stat_result | None, content: _Pieces) -> None:
    if status is not None:
        _check_may_be_written(target)
    # In the same folder: only there does a rename replace at once. No longer than the shortest limit to names.
    draft = target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}")
    try:
        _draft(draft, status, content)
        os.replace(draft, target)
    except OSError as error:
        if status is None or error.errno not in _CLOSED_FOLDER:
            raise
        _write_straight(target, status, content)
    finally:
        with suppress(OSError):  # the folder that took no draft has none
            draft.unlink(missing_ok=True)


def _draft(draft: Path, status: os.stat_result | None, content: _Pieces) -> None:
    """Write the draft; nobody may see in it what they may not see in the file whose place it takes."""
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _WITHOUT_WAITING, 0o666 if status is None else 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        if status is not None and hasattr(os, "fchown"):
            with suppress(PermissionError):
                os.fchown(descriptor, -1, status.st_gid)
            with suppress(PermissionError):
                os.fchown(descriptor, status.st_uid, -1)
        _write(file.fileno(), content)
        if status is not None and hasattr(os, "fchmod"):
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode))  # after the owner: changing that takes away setuid


def _write_straight(path: _PathLike, status: os.stat_result, content: _Pieces) -> None:
    """Into what stands there. Raises OSError, in a sentence where it is a FIFO that nobody reads."""
    standard = _is_open_for_output(status)
    if standard is not None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        _write(standard, content)
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | _WITHOUT_WAITING | (os.O_TRUNC if stat.S_ISREG(status.st_mode) else 0))
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "nobody reads this FIFO or socket: start its reader first") from error
        raise
    with open(descriptor, "wb", buffering=0):
        _write(descriptor, content)


def _write(descriptor: int, content: _Pieces) -> None:
    for piece in [content] if isinstance(content, bytes) else content:
        rest = memoryview(piece)
        while rest:
            try:
                rest = rest[os.write(descriptor, rest) :]
            except BlockingIOError:  # a pipe that is full
                _await_reader(descriptor)


def _await_reader(descriptor: int) -> None:
    waiting = select.poll()
    waiting.register(descriptor, select.POLLOUT)
    # Standard output may be held up for as long as a person looks at a page.
    if not waiting.poll(None if descriptor in (1, 2) else _SILENT_SECONDS * 1000):
        raise OSError(errno.ETIMEDOUT, f"whoever reads it took nothing for {_SILENT_SECONDS:g} seconds")


def _limited(chunks: Iterator[bytes]) -> bytes:
    parts, size = [], 0
    for chunk in chunks:
        parts.append(chunk)
        size += len(chunk)
        if size > _MOST_BYTES:
            raise OSError(errno.EFBIG, f"expected at most {_MOST_BYTES:,} bytes, got more")
    return b"".join(parts)


def _arriving(descriptor: int) -> Iterator[bytes]:
    """What comes through a pipe, FIFO or terminal until its end."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    while True:
        came = waiting.poll(_NO_WRITER_SECONDS * 1000)
        try:
            chunk = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:  # there is a writer, and it has said nothing yet
            if not waiting.poll(_SILENT_SECONDS * 1000):
                _refuse_silence(f"nothing came for {_SILENT_SECONDS:g} seconds")
            continue
        if not chunk and not came:
            _refuse_silence("nobody writes to it")
        if not chunk:
            return
        yield chunk


def _refuse_silence(why: str) -> NoReturn:
    raise OSError(errno.ETIMEDOUT, f"expected a whole file, but {why}: write a regular file first")


def _refuse_kind(status: os.stat_result) -> NoReturn:
    names = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a block device", stat.S_IFSOCK: "a socket"}
    raise OSError(errno.EINVAL, f"expected a regular file, got {names.get(stat.S_IFMT(status.st_mode), 'something else')}")


_PATIENCE_SECONDS = 5.0  # whoever holds a lock of lowtide's reads and writes a small file
_PAUSE_SECONDS = 0.01
_given_up: set[Path] = set()  # what this process has waited for in vain: it asks again, but waits no more

if sys.platform == "win32":

    @contextmanager
    def locked(path: Path) -> Iterator[None]:
        """No lock: of two processes that write in the same instant one may have to do its work again."""
        yield

else:
    import fcntl

    @contextmanager
    def locked(path: Path) -> Iterator[None]:
        """Hold the lock of `path`, a file made for this. Raises OSError where that cannot be made, TimeoutError where others keep it."""
        # A FIFO or a terminal in the file's place holds nobody up, and a link leads nowhere.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "expected a regular file", str(path))
            _wait_for(descriptor, path)
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file open too
            os.close(descriptor)

    def _wait_for(descriptor: int, path: Path) -> None:
        until = time.monotonic() + (0 if path in _given_up else _PATIENCE_SECONDS)
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() >= until:
                    _given_up.add(path)
                    message = f"another process has held this lock for {_PATIENCE_SECONDS:g} seconds"
                    raise TimeoutError(errno.ETIMEDOUT, message, str(path)) from error
            except OSError:  # a network's file system without locks: files are replaced as a whole all the same
                return None
            time.sleep(_PAUSE_SECONDS)


def directory() -> Path | None:
    """The folder, whether it exists or not; None where there can be none."""
    chosen, usual = os.environ.get("LOWTIDE_CACHE"), _usual()
    if chosen:
        return Path(os.path.expanduser(chosen))
    return usual if usual is not None and _can_be_written(usual) else _temporary()


def warn_if_not_cached() -> None:
    """Say, once and before something is written, that there is no lasting place for it."""
    usual, folder = _usual(), directory()
    if os.environ.get("LOWTIDE_CACHE") or (folder is not None and folder == usual):
        return
    missing = "there is no home folder" if usual is None else f"{usual} cannot be written"
    warn_not_cached(missing if folder is None else f"{missing}, and {folder} may be emptied by the system")


def warn_not_cached(why: object) -> None:
    """Say, once for whatever is lost, that what is made now will have to be made again."""
    warn_once(
        "not cached",
        f"lowtide cannot keep what it measures and compiles for other processes: {why}; set LOWTIDE_CACHE to a folder that lasts",
    )


def own_folder(folder: Path) -> Path:
    """The folder, which only this user may write to: made where it is missing, and made anew where others could have written to it.

    Raises OSError where it cannot be made, PermissionError where it is somebody else's, or no folder.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not hasattr(os, "geteuid"):  # Windows keeps each user's folders to that user
        return folder
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is not this user's own folder: remove it, or set LOWTIDE_CACHE to another place")
    if status.st_mode & _OTHERS_MAY_WRITE:
        shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
    return folder


def warn_once(about: str, sentence: str) -> None:
    """Say a sentence, unless this process has said one about the same before."""
    if about not in _warned:
        _warned.add(about)
        warn(sentence, RuntimeWarning)


def _usual() -> Path | None:
    """What the system's customs give; None where this user has no home."""
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(caches):  # as the custom wants it; one that is relative would be another in every folder
        return Path(caches) / "lowtide"
    try:
        return Path.home() / ".cache" / "lowtide"
    except RuntimeError:
        return None


def _can_be_written(folder: Path) -> bool:
    """Whether a folder takes files, or can be made where it is missing."""
    there = next((each for each in (folder, *folder.parents) if os.path.lexists(each)), folder)
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _temporary() -> Path | None:
    """This user's own folder in the place for temporary files; None where that cannot be, or would not be safe from others."""
    if not hasattr(os, "geteuid"):
        return None
    try:
        folder = Path(tempfile.gettempdir())
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return None  # anybody could put a folder of their own in the place of this one
        return own_folder(folder / f"lowtide-{os.geteuid()}")
    except OSError:
        return None
