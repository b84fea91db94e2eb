"""All that is to be measured on a GPU, in the order of worth, each part in a process of its own, with a time limit.

    python -m bench.on_gpu [--minutes 40] [--only PART ...] [--again]

Rows are saved as they come, and a part that has rows of this device is not run again: what was cut off goes on where it was. Without a GPU
it is a dry run: every part does on the CPU what it would do on a GPU, on small stand-ins, and nothing is saved. The exit code is 1 where
something failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from bench.on_gpu.ground import Ground, Row
from bench.on_gpu.parts import PARTS, Part
from bench.sweep import Sweep

COLUMNS = (
    "part", "setting", "device", "verdict", "promised_bytes", "measured_bytes", "reserved_bytes", "eager_bytes", "promised_ratio",
    "measured_ratio", "step_ms", "peak_share", "recomputed", "operators", "seconds", "why",
)  # fmt: skip
_PATIENCE = 5  # times as long on a CPU, whose cores others may use
_BAD = ("failed", "different", "raised", "dead", "time-out", "off")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=40.0, help="of wall clock, for all that is run")
    parser.add_argument("--only", nargs="+", default=[""], metavar="PART", help="parts whose name has one of these in it")
    parser.add_argument("--again", action="store_true", help="also parts that have rows of this device")
    options = parser.parse_args()
    ground = Ground.here()
    chosen = [part for part in PARTS if any(text in part.name for text in options.only)]
    done = set() if options.again or ground.dry else {row["part"] for row in SWEEP.saved() if row["device"] == ground.name}
    pending = [part for part in chosen if part.name not in done]
    rows = run(pending, time.monotonic() + 60 * options.minutes, _PATIENCE if ground.dry else 1)
    table = SWEEP.run(rows, save=not ground.dry)
    table.print()
    sys.exit(any(row["verdict"] in _BAD for row in table.rows))


def run(parts: Sequence[Part], deadline: float, patience: int = 1) -> Iterator[Row]:
    """The rows of these parts, as far as the time goes."""
    for part in parts:
        left = deadline - time.monotonic()
        if left <= 0:
            print(f"out of time before {part.name!r}: run again to go on", file=sys.stderr)
            return
        yield from attempt(part, min(patience * part.seconds, left))


def attempt(part: Part, seconds: float) -> Iterator[Row]:
    """One part in a process of its own: what it told before it ended, and how it ended where that was not well."""
    clock = time.monotonic()
    process = subprocess.Popen(_command(part.name), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=seconds)
        ended: Row = {} if process.returncode == 0 else {"verdict": "dead", "why": f"exit code {process.returncode}: {_last(err)}"}
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        ended = {"verdict": "time-out", "why": f"ended after {seconds:.0f} s"}
    found: list[Row] = [_row(line) for line in out.splitlines() if line.startswith("{")]
    for row in [*found, *([ended] if ended else [])]:
        yield {"part": part.name, "device": Ground.here().name, "seconds": round(time.monotonic() - clock, 1)} | row


def _command(name: str) -> list[str]:
    return [sys.executable, "-m", "bench.on_gpu.one", name]


def _row(line: str) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(line)
    return row


def _last(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:300]


def summary(rows: list[Row]) -> tuple[str, ...]:
    """What the rows come to."""
    return tuple(f"{count} {verdict}" for verdict, count in Counter(row["verdict"] for row in rows).most_common())


SWEEP = Sweep("on_gpu", "On a GPU: promised and measured", COLUMNS, [part.name for part in PARTS], summary)

if __name__ == "__main__":
    main()
