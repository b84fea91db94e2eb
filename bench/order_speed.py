"""The exact engine against its yardstick in C++, on every ordering instance whose optimum is known.

    python -m bench.order_speed [--instances FOLDER] [--only NAME ...] [--repeats 3] [--seconds 60]

The two take turns, after the engine's kernels are compiled; seconds are medians. An instance is `ok` where the engine proves the known
optimum within the allowed seconds: twice the yardstick's or 0.2 s, whichever is more, and less where `STRICTER_S` says so. Without g++
the seconds in `expected.csv` stand in for the yardstick's.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.results import Results
from bench.yardstick import Yardstick
from lowtide.problems import Status
from lowtide.problems.files import load_problem
from lowtide.problems.order import OrderProblem
from lowtide.schedule import Schedule
from lowtide.schedule.exact import Exact

INSTANCES = Path(__file__).parents[1] / "tests" / "data" / "order"
STRICTER_S = {"train-L660": 1.0, "train-L660-res": 1.0, "hrnet_w18_small_v2-256-s1_32x1": 8.0}
COLUMNS = (
    "instance", "operators", "optimum_kib", "found_kib", "status", "states", "engine_s", "yardstick_s", "ratio", "allowed_s", "ok",
)  # fmt: skip
_LEAST_ALLOWED_S = 0.2
_WARM_UP_STATES = 64


@dataclass(frozen=True)
class Instance:
    """A row of `expected.csv` and its problem."""

    name: str
    problem: OrderProblem
    optimum_kib: float  # to a tenth
    reference_s: float  # the yardstick's, on the machine where the optimum was proven


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=Path, default=INSTANCES, help="a folder with expected.csv and the files that it names")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60, help="a cap for each solver")
    options = parser.parse_args()
    known = [each for each in instances(options.instances) if not options.only or each.name in options.only]
    with tempfile.TemporaryDirectory() as folder:
        yardstick = Yardstick.build(Path(folder))
        results = table(known, yardstick, Exact(max_states=10**9, max_seconds=options.seconds), options.repeats, options.seconds)
    if not options.only:
        results.save()
    results.print()


def instances(folder: Path) -> list[Instance]:
    """All of a folder. Raises OSError where a file is missing."""
    with (folder / "expected.csv").open(encoding="utf-8", newline="") as file:
        return [
            Instance(row["name"], load_problem(folder / f"{row['name']}.json"), float(row["optimum_kib"]), float(row["reference_seconds"]))
            for row in csv.DictReader(file)
        ]


def table(known: Iterable[Instance], yardstick: Yardstick | None, engine: Exact, repeats: int, seconds: float) -> Results:
    """One row an instance."""
    known = list(known)
    for each in known:
        replace(engine, max_states=_WARM_UP_STATES).solve(each.problem)  # compiles, or loads what was compiled
    rows = tuple(_row(each, yardstick, engine, repeats, seconds) for each in known)
    notes = "engine_s, yardstick_s: medians of runs that take turns; allowed_s: twice the yardstick's or 0.2 s, or as demanded"
    instead = () if yardstick else ("no g++ here: yardstick_s is the known one, of another machine",)
    return Results("order_speed", "The exact engine against its yardstick", COLUMNS, rows, (notes, *instead))


def _row(each: Instance, yardstick: Yardstick | None, engine: Exact, repeats: int, seconds: float) -> dict[str, Any]:
    ours, theirs, found = [], [], None
    for _ in range(max(1, repeats)):
        start = time.perf_counter()
        found = engine.solve(each.problem)
        ours.append(time.perf_counter() - start)
        theirs.append(each.reference_s if yardstick is None else yardstick.solve(each.problem, seconds).seconds)
    assert found is not None  # there is one repeat at least
    engine_s, yardstick_s = statistics.median(ours), statistics.median(theirs)
    allowed_s = STRICTER_S.get(each.name, max(2 * yardstick_s, _LEAST_ALLOWED_S))
    return {
        "instance": each.name,
        "operators": each.problem.node_count,
        "optimum_kib": each.optimum_kib,
        "found_kib": found.peak_bytes / 1024,
        "status": found.status.name.lower(),
        "states": found.stats.get("states", 0),
        "engine_s": engine_s,
        "yardstick_s": yardstick_s,
        "ratio": engine_s / yardstick_s if yardstick_s else None,
        "allowed_s": allowed_s,
        "ok": "yes" if _is_proven(found, each) and engine_s <= allowed_s else "NO",
    }


def _is_proven(found: Schedule, each: Instance) -> bool:
    """The known optima are rounded to a tenth of a KiB."""
    return found.status is Status.OPTIMAL and abs(found.peak_bytes / 1024 - each.optimum_kib) <= 0.0501


if __name__ == "__main__":
    main()
