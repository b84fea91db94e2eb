"""Architectures of transformers, timm, torchvision and torch.nn at small sizes, trained and called eagerly and by lowtide, bit for bit.

    python -m bench.coverage [--only PART ...] [--missing] [--jobs 1] [--limit-seconds 300]

Each is a process of its own, with a time limit. "dead" is a process that ended without an answer. Each row goes into the saved table as
soon as it is known, and rows of other subjects stay. The last lines count; the table has the reason for each refusal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from bench.coverage.subjects import SUBJECTS
from bench.sweep import Row, Sweep, add_options

COLUMNS = ("subject", "training", "inference", "peak_share", "seconds", "why", "why_not_inferred")
_WELL = ("right", "eager differs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="PART", help="subjects whose name has one of these parts")
    parser.add_argument("--jobs", type=int, default=1)
    add_options(parser, limit_seconds=300.0)
    options = parser.parse_args()
    names = SWEEP.selected(options, lambda name: any(part in name for part in options.only))
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = pool.map(lambda name: attempt(name, options.limit_seconds), names)
        SWEEP.run(rows, save=not options.no_save).print()


def attempt(name: str, limit_seconds: float) -> Row:
    """One subject in a process of its own."""
    command = [sys.executable, "-m", "bench.coverage.trial", name]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return {"subject": name, "training": "time-out", "inference": "time-out", "why": f"no answer in {limit_seconds:.0f} s"}
    try:
        answer: Row = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.splitlines() or [""])[-1]
        return {"subject": name, "training": "dead", "inference": "dead", "why": f"exit code {done.returncode}: {last[:300]}"}
    return answer


def summary(rows: Sequence[Row]) -> tuple[str, ...]:
    """What the rows come to."""
    notes = []
    for what in ("training", "inference"):
        verdicts = Counter(row[what] for row in rows)
        possible = len(rows) - verdicts["not in eager"]
        well = sum(verdicts[each] for each in _WELL)
        counted = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        notes.append(f"{what}: {well} of {possible} that eager can ({well / max(1, possible):.1%}): {counted}")
    return tuple(notes)


SWEEP = Sweep(
    "coverage",
    "Programs that nobody here wrote, three training steps and a call, bit for bit",
    COLUMNS,
    [subject.name for subject in SUBJECTS],
    summary,
)

if __name__ == "__main__":
    main()
