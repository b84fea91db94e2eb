"""A newcomer's first half hour: the blocks of docs/half_hour.md in a clean folder, environment and cache, one behind the other.

    python -m bench.half_hour

The environment is made by the Python that runs this; packages come from where pip is set to look (PIP_CONSTRAINT names a build of torch
where the newest is not wanted). What pip has already fetched is not fetched again.
"""

from __future__ import annotations

import re
import tempfile

from bench.clean import ROOT, clean
from bench.results import Results

COLUMNS = ("block", "seconds", "lines_printed")
NOTES = ("wall clock; the first that captures and plans also compiles lowtide's kernels, once for each machine",)
_BLOCK = re.compile(r"^## ([^\n]+)\n(?:(?!^```).)*^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        place = clean(folder)
        for title, commands in _BLOCK.findall((ROOT / "docs/half_hour.md").read_text(encoding="utf-8")):
            entered = "" if not rows else ". half/bin/activate\n"
            printed, took_s = place.run(title, entered + commands)
            rows.append({"block": title, "seconds": round(took_s, 1), "lines_printed": printed.count("\n")})
            print(rows[-1], printed[-1500:], sep="\n", flush=True)
    results = Results("half_hour", "The first half hour", COLUMNS, tuple(rows), NOTES)
    results.save()
    results.print()


if __name__ == "__main__":
    main()
