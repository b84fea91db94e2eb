"""What was freed becomes the system's again."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from lowtide.api import frozen


def resident_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep nothing, or say nothing")
def test_what_is_free_is_given_back() -> None:
    blocks = [torch.ones(2**14) for _ in range(512)]  # 32 MiB, each too small for a mapping of its own
    last = torch.ones(2**14)  # the heap cannot shrink by itself
    del blocks
    before = resident_bytes()
    frozen.give_back()
    assert resident_bytes() < before - 2**24
    assert last.sum() == 2**14


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []
    monkeypatch.setattr(frozen, "_trim", lambda: asked.append(None))
    frozen.give_back()
    assert asked == [None]
