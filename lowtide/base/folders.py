"""Where lowtide keeps what it can make again: measurements, compiled kernels, the planned allocator.

$LOWTIDE_CACHE is taken at its word. Else it is `lowtide` in $XDG_CACHE_HOME or in ~/.cache, where that can be written; else a folder of
this user alone beside the system's temporary files; else there is none. Whatever such a folder lacks costs a warning, once, and seconds.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

from lowtide.base.messages import warn

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_warned: set[str] = set()  # what this process has been warned of


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
