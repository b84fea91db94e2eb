"""Files that are whole or not there."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from lowtide.errors import FormatError


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write text or bytes so that the file at `path` is at every moment either whole or what it was before. Raises OSError."""
    path = Path(path)
    # In the same folder: only there does a rename replace at once.
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def read_utf8(path: str | os.PathLike[str]) -> str:
    """The text of a file. Raises FormatError where it is not UTF-8, OSError where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{os.fspath(path)}: expected text in UTF-8: {error}") from error
