"""A folder, environment and cache with nothing in them: what a newcomer begins with."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_TAKEN_OUT = ("PYTHONPATH", "NUMBA_CACHE_DIR", "VIRTUAL_ENV", "PYTHONHOME")


@dataclass(frozen=True)
class Clean:
    """Commands run here see this folder alone: `python3` is the one that runs this, `$LOWTIDE` a copy of the checkout."""

    folder: Path

    def run(self, title: str, commands: str, limit_s: float = 900) -> tuple[str, float]:
        """What the commands printed, and the seconds they took. Raises SystemExit where one fails or the time is over."""
        begun = time.perf_counter()
        try:
            done = subprocess.run(
                ["bash", "-ec", commands],
                cwd=self.folder,
                env=self._environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{title}: not over within {limit_s:.0f} s") from None
        if done.returncode:
            raise SystemExit(f"{title}: {done.stdout[-3000:]}")
        return done.stdout, time.perf_counter() - begun

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in _TAKEN_OUT}
        home, path = str(self.folder / "home"), f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return kept | {"HOME": home, "XDG_CACHE_HOME": home, "LOWTIDE": str(self.folder / "lowtide"), "PATH": path}


def clean(folder: str) -> Clean:
    """Lay out the folder. The copy is the checkout as git has it: an installation builds in its folder, which is to stay as it is."""
    made = Path(folder)
    for name in ("home", "bin"):
        (made / name).mkdir()
    (made / "bin/python3").symlink_to(Path(sys.executable).resolve())
    subprocess.run(["git", "clone", "-q", str(ROOT), str(made / "lowtide")], check=True)
    return Clean(made)
