"""A newcomer's first half hour: the blocks of docs/half_hour.md in a clean folder, environment and cache, one behind the other.

    python -m bench.half_hour

The environment is made by the Python that runs this; packages come from where pip is set to look. What pip has already fetched is not
fetched again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.results import Results

ROOT = Path(__file__).parents[1]
COLUMNS = ("block", "seconds", "lines_printed")
NOTES = ("wall clock; the first that captures and plans also compiles lowtide's kernels, once for each machine",)
_BLOCK = re.compile(r"^## ([^\n]+)\n(?:(?!^```).)*^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "home")
        home.mkdir()
        python = Path(folder, "bin")
        python.mkdir()
        Path(python, "python3").symlink_to(sys.executable)
        set_ = {"HOME": str(home), "XDG_CACHE_HOME": str(home), "LOWTIDE": str(_source(folder)), "PATH": f"{python}:{os.environ['PATH']}"}
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NUMBA_CACHE_DIR", "VIRTUAL_ENV")}
        for title, commands in _BLOCK.findall((ROOT / "docs/half_hour.md").read_text(encoding="utf-8")):
            entered = "" if not rows else ". half/bin/activate\n"
            begun = time.perf_counter()
            done = subprocess.run(
                ["bash", "-ec", entered + commands],
                cwd=folder,
                env=kept | set_,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            took_s = time.perf_counter() - begun
            if done.returncode:
                raise SystemExit(f"{title}: {done.stdout[-2000:]}")
            rows.append({"block": title, "seconds": round(took_s, 1), "lines_printed": done.stdout.count("\n")})
            print(rows[-1], done.stdout[-1500:], sep="\n", flush=True)
    results = Results("half_hour", "The first half hour", COLUMNS, tuple(rows), NOTES)
    results.save()
    results.print()


def _source(folder: str) -> Path:
    """The checkout as git has it: an installation builds in its folder, which is to stay as it is."""
    copy = Path(folder, "lowtide")
    subprocess.run(["git", "clone", "-q", str(ROOT), str(copy)], check=True)
    return copy


if __name__ == "__main__":
    main()
