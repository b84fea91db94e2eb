"""What a result was measured on, in words that name no machine."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from lowtide.cost.profiler import device_name

_PACKAGES = ("numpy", "numba")
_CHECKOUT = Path(__file__).parents[1]


def machine() -> dict[str, str | int]:
    """Processor, memory, threads, GPU where there is one, and versions: what a reader needs to compare. No host name, no path."""
    found: dict[str, str | int] = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": device_name("cpu"),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "memory_bytes": _memory_bytes(),
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        found["gpu"] = device_name("cuda")
    found["torch"] = torch.__version__  # with the build: wheels with CUDA may leave that out of their metadata
    return found | {name: metadata.version(name) for name in _PACKAGES}


def code() -> str:
    """The last commit that changed the package, with a "+" where its files differ from that; "" outside of a checkout."""
    commit, changed = _git("log", "-1", "--format=%h"), _git("status", "--porcelain")
    return f"{commit}+" if commit and changed else commit


def _git(*words: str) -> str:
    """What git says of the package's folder; nothing where there is no git, or no checkout."""
    try:
        done = subprocess.run(["git", *words, "--", "lowtide"], cwd=_CHECKOUT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def _memory_bytes() -> int:
    """Memory of the machine; 0 where the system does not tell."""
    info = Path("/proc/meminfo")
    told = re.search(r"MemTotal:\s*(\d+) kB", info.read_text(encoding="utf-8")) if info.exists() else None
    return int(told[1]) * 1024 if told else 0
