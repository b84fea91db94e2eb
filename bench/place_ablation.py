"""What each technique of the exact placer is worth: the instances of a folder, placed with all of them, and with each one turned off.

    python -m bench.place_ablation FOLDER [--instances A B ...] [--nodes 100000] [--seconds 15]

An instance's capacity stands in its file's name, NAME.CAPACITY.csv. Each pair of instance and setting gets one run of at most so many
nodes, and at most so many seconds of wall clock; kernels are compiled, or loaded, before.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

from bench.results import Cell, Results
from lowtide.placement.exact import Exact
from lowtide.problems.files import load_buffers
from lowtide.problems.placement import PlaceProblem

SWITCHES = ("canonical", "inference", "lifting", "decomposition", "dynamic", "symmetry", "memory", "restarts")
COLUMNS = ("instance", "off", "status", "nodes", "cpu_s", "seconds")
NOTES = (
    'off: the technique that is turned off, "" for none; nodes, cpu_s: until there was an answer, or nodes or time were up (UNKNOWN)',
    "bench/place_ablation.py; other processes ran on the same cores: nodes are the surer measure",
)


def main() -> None:
    """Run, print and save the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--instances", nargs="+", help="names, in front of the first dot (default: all with a capacity)")
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=15.0)
    arguments = parser.parse_args()
    paths = sorted(path for path in arguments.folder.glob("*.csv") if path.stem.partition(".")[2].isdigit())
    paths = [path for path in paths if not arguments.instances or _name(path) in arguments.instances]
    if not paths:
        parser.error(f"{arguments.folder}: expected files NAME.CAPACITY.csv")
    rows: list[dict[str, Cell]] = []
    for path in paths:
        problem, capacity_bytes = load_buffers(path), int(path.name.split(".")[1])
        placer = Exact(max_nodes=arguments.nodes, max_seconds=arguments.seconds)
        replace(placer, max_nodes=1_000).place(problem, capacity_bytes)
        rows += [{"instance": _name(path), **_row(problem, capacity_bytes, placer, off)} for off in ("", *SWITCHES)]
        results = Results("place_ablation", "The exact placer without each of its techniques", COLUMNS, tuple(rows), NOTES)
        results.save()
    results.print()


def _name(path: Path) -> str:
    return path.name.split(".")[0]


def _row(problem: PlaceProblem, capacity_bytes: int, placer: Exact, off: str) -> dict[str, Cell]:
    if off:
        placer = replace(placer, **{off: False})
    began, cpu = time.perf_counter(), time.process_time()
    found = placer.place(problem, capacity_bytes)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return {"off": off, "status": found.status.name, "nodes": found.stats["nodes"], "cpu_s": round(cpu, 3), "seconds": round(seconds, 3)}


if __name__ == "__main__":
    main()
