"""Measurements kept on disk, so that a machine is asked once.

One JSON file for each kind of measurement and each set of circumstances (library version, device, threads); in it, whole numbers by key, or
texts of one form. A file is replaced as a whole or not at all, and one that does not read, or holds what cannot have been measured, is a
file that is measured anew. Two processes that write at once both have their say; of a key that both measured the first entry stays, so that
all who share the file agree. Nothing that is read is ever executed. A cache that cannot be read, written or locked in time costs one
warning.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from lowtide.base.files import directory, locked, read_utf8, warn_if_not_cached, warn_not_cached, warn_once, write_whole

_FORMAT = 1
_Stamp: TypeAlias = tuple[int, int, int, int]  # of a file as it stands: another one once it is replaced or written to


@dataclass(frozen=True)
class Cache:
    """Whole numbers, or texts, by key, of one kind, measured under the same circumstances. The file's name follows from both."""

    kind: str  # an identifier: "workspaces"
    circumstances: tuple[str, ...]  # all that the numbers depend on and the keys do not say
    least: int = 0  # that can be measured
    most: int = 2**60
    parse: Callable[[str], object] | None = None  # for texts: raises ValueError for what is none; None for numbers

    @property
    def path(self) -> Path | None:
        """The file, whether it exists or not; None where there is no place for it."""
        digest = hashlib.sha256(json.dumps(self.circumstances).encode()).hexdigest()[:16]
        folder = directory()
        return None if folder is None else folder / f"{self.kind}-{digest}.json"

    def load(self) -> dict[str, Any]:
        """What is known; nothing if there is no file, or, with a warning, if it does not read."""
        path = self.path
        try:
            return {} if path is None else dict(self._checked(path))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            warn_once(str(path), f"{path} does not read ({error}): its measurements will be taken again")
            return {}

    def merge(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Add to the file what it does not know yet; all it then holds. One that cannot be written costs a warning, not the measurement."""
        warn_if_not_cached()
        path = self.path
        if path is None:
            return dict(entries)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked(path.with_suffix(".lock")):
                known = dict(entries) | self.load()
                write_whole(path, json.dumps(self._document(known), indent=1, sort_keys=True), regular=True)
            return known
        except OSError as error:
            warn_not_cached(error)
            return dict(entries) | self.load()

    def _document(self, entries: dict[str, Any]) -> dict[str, object]:
        return {"format": _FORMAT, "kind": self.kind, "circumstances": list(self.circumstances), "entries": entries}

    def _checked(self, path: Path) -> dict[str, Any]:
        """What the file holds. Raises OSError or ValueError where it does not read."""
        stamp, kept = _stamp(path), (self, path)
        if kept not in _checked or _checked[kept][0] != stamp:
            _checked[kept] = stamp, self._parse(read_utf8(path, regular=True))
        return _checked[kept][1]

    def _parse(self, text: str) -> dict[str, Any]:
        document = json.loads(text)
        if not isinstance(document, dict) or not isinstance(entries := document.get("entries"), dict):
            raise ValueError('expected an object with "entries"')
        if document != self._document(entries):
            raise ValueError(f'expected format {_FORMAT}, kind "{self.kind}" and the circumstances that the file is named after')
        for entry in entries.values():
            self._check(entry)
        return entries

    def _check(self, entry: object) -> None:
        """Raises ValueError for what cannot have been measured."""
        if self.parse is None:
            if type(entry) is not int or not self.least <= entry <= self.most:
                raise ValueError(f"expected every entry to be a whole number from {self.least} to {self.most}")
        elif isinstance(entry, str):
            self.parse(entry)
        else:
            raise ValueError(f"expected every entry to be a text, got a {type(entry).__name__}")


def _stamp(path: Path) -> _Stamp:
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


# What files held when they were last read, by cache and path: each is checked once as it stands.
_checked: dict[tuple[Cache, Path], tuple[_Stamp, dict[str, Any]]] = {}
