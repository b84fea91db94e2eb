"""MAGIS's seven workloads on its machine, as numbers: what lowtide makes of a step when it may recompute, swap, split and rewrite.

    python -m bench.magis [--workloads NAME ...] [--networks published lean] [--moves recompute swap split] [--keep]
    python -m bench.magis --draw          the plot again, of the saved rows

Each row is one search in a process of its own: a whole training step with plain SGD on the meta device, by the roofline of the preset
"rtx3090". One frontier answers everything: the time at 80 % and at 40 % of the peak, the least peak at +5 % and +10 % time. Beside it
stand MAGIS as released, which also cuts operators along their dimensions, and eviction with look-ahead alone, both on the same cost model.
"recompute" and "swap" leave every number as it is; "split" is swapping with `exact=False`: sets of operators part by part, and algebra.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from bench.magis_answers import answered, known_answers, tables
from bench.magis_plots import draw
from bench.magis_workloads import CASES
from bench.models.workload import Entry
from bench.results import RESULTS, load

FRONTIERS = RESULTS / "magis_frontiers.json"
MOVES = ("recompute", "swap", "split")
_TIMEOUT_S = 1800


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--workloads", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--networks", nargs="+", default=["published", "lean"], choices=["published", "lean"])
    parser.add_argument("--moves", nargs="+", default=list(MOVES), choices=MOVES)
    parser.add_argument("--keep", action="store_true", help="keep the other rows of the saved table")
    parser.add_argument("--draw", action="store_true", help="draw the plot of the saved rows, and nothing else")
    parser.add_argument("--one", nargs=3, metavar=("WORKLOAD", "NETWORK", "MOVES"), help="one row: for the process of its own")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_planned(*options.one)))
    elif not options.draw:
        _run(options)
    if not options.one:
        for name in ("magis", "magis_effort"):
            load(name).print()
        draw(json.loads(FRONTIERS.read_text(encoding="utf-8")), CASES)


def _run(options: argparse.Namespace) -> None:
    wanted = list(_wanted(options))
    rows = [row for row in (_saved_rows() if options.keep else ()) if _key(row) not in wanted]
    frontiers = json.loads(FRONTIERS.read_text(encoding="utf-8")) if options.keep and FRONTIERS.exists() else {}
    places = {key: place for place, key in enumerate(_all_keys())}
    for key in wanted:
        row = _in_its_own_process(*key)
        frontiers[" | ".join(key)] = row.pop("frontier", [])
        rows = sorted([*rows, row], key=lambda row: places[_key(row)])
        for table in tables(rows):
            table.save()
        FRONTIERS.write_text(json.dumps(frontiers, indent=None) + "\n", encoding="utf-8")
        print({name: cell for name, cell in row.items() if cell is not None}, flush=True)


def _saved_rows() -> list[dict[str, Any]]:
    """Both tables joined, without the cells that are empty."""
    pairs = zip(load("magis").rows, load("magis_effort").rows, strict=True)
    return [{name: cell for name, cell in (dict(answers) | dict(effort)).items() if cell is not None} for answers, effort in pairs]


def _all_keys() -> Iterator[tuple[str, str, str]]:
    """Every row that there can be, in the order of the table."""
    for case in CASES:
        for entry in (*case.published, case.lean):
            for moves in MOVES:
                yield case.name, entry.name, moves


def _wanted(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    for name, network, moves in _all_keys():
        kind = "lean" if network.endswith(", lean") else "published"
        if name in options.workloads and kind in options.networks and moves in options.moves:
            yield name, network, moves


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["workload"], row["network"], row["moves"]


def _in_its_own_process(name: str, network: str, moves: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.magis", "--one", name, network, moves]
    row = {"workload": name, "network": network, "moves": moves}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return row | {"failed": f"took more than {_TIMEOUT_S} s"}
    if done.returncode != 0:
        return row | {"failed": (done.stderr.strip().splitlines() or [str(done.returncode)])[-1][:200]}
    return row | json.loads(done.stdout.strip().splitlines()[-1])


def _planned(name: str, network: str, moves: str) -> dict[str, Any]:
    """One row: a search in this process."""
    from bench.magis_plan import plan

    case = next(case for case in CASES if case.name == name)
    entry: Entry = next(entry for entry in (*case.published, case.lean) if entry.name == network)
    found = plan(entry, case.batch_size, swap=moves != "recompute", parts=moves == "split")
    wanted = (
        dict(zip(("wanted_at_80", "wanted_at_40"), case.wanted, strict=True)) if moves == "split" and entry is case.published[0] else {}
    )
    return answered(found) | wanted | known_answers(found, case.known, network) | {"frontier": found.shares()}


if __name__ == "__main__":
    main()
