"""How much memory this machine has to spare."""

from __future__ import annotations

from pathlib import Path


def available_bytes() -> int:
    """Memory that is free now; 0 where the system does not tell."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return 0
    found = [line for line in info.read_text(encoding="utf-8").splitlines() if line.startswith("MemAvailable:")]
    return int(found[0].split()[1]) * 1024 if found else 0
