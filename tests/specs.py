"""A module that the command line is given the name of."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


def spec_module(name: str, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module to name, in the working directory; the search path and the modules are as before afterwards."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("LOWTIDE_CACHE", str(folder / "cache"))
    yield
    sys.modules.pop(name, None)
