"""How much memory this machine has to spare."""

from __future__ import annotations

from pathlib import Path

import numpy as np

_SHARE = 0.8


def available_bytes() -> int:
    """Memory that is free now; 0 where the system does not tell."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return 0
    found = [line for line in info.read_text(encoding="utf-8").splitlines() if line.startswith("MemAvailable:")]
    return int(found[0].split()[1]) * 1024 if found else 0


def touch_memory() -> None:
    """Write to most of the memory that is free, once, and give it back.

    On a virtual machine the very first write to a page can take ten times as long as later ones, since the host has to find it. Which
    pages a step gets is chance, so that without this the first program to use much memory would seem slow.
    """
    np.ones(int(_SHARE * available_bytes()), dtype=np.uint8)
