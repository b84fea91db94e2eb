"""Another user for a test's processes: one that owns nothing, has no home and no entry among the users, as containers have them."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest

_UID = "54321"
# It may read everything, so that it finds Python wherever that is, and write nothing.
_PREFIX = (
    "setpriv", f"--reuid={_UID}", f"--regid={_UID}", "--clear-groups", "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
)  # fmt: skip


def as_stranger() -> tuple[str, ...]:
    """What to put before a command. Skips the test where that cannot be had."""
    if not _can_be_had():
        pytest.skip("it takes root and setpriv to be somebody else")
    return _PREFIX


def bare(environment: dict[str, str]) -> dict[str, str]:
    """An environment without HOME and choices of folders, but for what is given."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")}
    return kept | environment


def reachable(folder: Path) -> Path:
    """A folder of pytest's that everybody may enter."""
    for path in (folder, *folder.parents[:2]):
        path.chmod(0o755)
    return folder


@functools.cache
def _can_be_had() -> bool:
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("setpriv") is None:
        return False
    return subprocess.run([*_PREFIX, "true"], capture_output=True, check=False).returncode == 0
