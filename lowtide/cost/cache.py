"""Measurements kept on disk, so that a machine is asked once.

One JSON file for each kind of measurement and each set of circumstances (library version, device, threads); in it, whole numbers by key. A
file is replaced as a whole or not at all, and one that does not read, or holds a number that cannot have been measured, is a file that is
measured anew. Two processes that write at once both have their say; of a key that both measured the first number stays, so that all who
share the file agree. Nothing that is read is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lowtide.ir.files import write_whole

_FORMAT = 1


@dataclass(frozen=True)
class Cache:
    """Whole numbers by key, of one kind, measured under the same circumstances. The file's name follows from both."""

    kind: str  # an identifier: "workspaces"
    circumstances: tuple[str, ...]  # all that the numbers depend on and the keys do not say
    least: int = 0  # that can be measured
    most: int = 2**60

    @property
    def path(self) -> Path:
        """The file, whether it exists or not."""
        digest = hashlib.sha256(json.dumps(self.circumstances).encode()).hexdigest()[:16]
        return directory() / f"{self.kind}-{digest}.json"

    def load(self) -> dict[str, int]:
        """What is known; nothing if there is no file, or, with a warning, if it does not read."""
        try:
            return self._parse(self.path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, RecursionError) as error:
            warnings.warn(f"{self.path} does not read ({error}): its measurements will be taken again", stacklevel=2)
            return {}

    def merge(self, entries: Mapping[str, int]) -> dict[str, int]:
        """Add to the file what it does not know yet; all it then holds. One that cannot be written costs a warning, not the measurement."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.with_suffix(".lock")):
                known = dict(entries) | self.load()
                write_whole(self.path, json.dumps(self._document(known), indent=1, sort_keys=True))
            return known
        except OSError as error:
            warnings.warn(f"{self.path} cannot be written ({error}): set LOWTIDE_CACHE to a directory that can", stacklevel=2)
            return dict(entries) | self.load()

    def _document(self, entries: dict[str, int]) -> dict[str, object]:
        return {"format": _FORMAT, "kind": self.kind, "circumstances": list(self.circumstances), "entries": entries}

    def _parse(self, text: str) -> dict[str, int]:
        document = json.loads(text)
        if not isinstance(document, dict) or not isinstance(entries := document.get("entries"), dict):
            raise ValueError('expected an object with "entries"')
        if document != self._document(entries):
            raise ValueError(f'expected format {_FORMAT}, kind "{self.kind}" and the circumstances that the file is named after')
        if not all(type(number) is int and self.least <= number <= self.most for number in entries.values()):
            raise ValueError(f"expected every entry to be a whole number from {self.least} to {self.most}")
        return entries


def directory() -> Path:
    """Where measurements are kept: $LOWTIDE_CACHE, or `lowtide` in $XDG_CACHE_HOME, or ~/.cache/lowtide."""
    if chosen := os.environ.get("LOWTIDE_CACHE"):
        return Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "lowtide"


if sys.platform == "win32":

    @contextmanager
    def _locked(path: Path) -> Iterator[None]:
        """No lock: of two processes that write in the same instant one may have to measure again."""
        yield

else:
    import fcntl

    @contextmanager
    def _locked(path: Path) -> Iterator[None]:
        """Hold the lock of `path` against other processes and other threads of this one."""
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
