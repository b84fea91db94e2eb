"""The allocator, built once."""

from __future__ import annotations

import pytest

from lowtide.runtime.arena import native
from lowtide.runtime.arena.allocator import Allocator


@pytest.fixture(scope="session")
def allocator(tmp_path_factory: pytest.TempPathFactory) -> Allocator:
    try:
        return Allocator(native.load(tmp_path_factory.mktemp("native")))
    except native.NativeError as why:
        pytest.skip(str(why))
