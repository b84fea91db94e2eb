"""Fills the table of best values with what lowtide's engines find; what is there and is better stays.

    python -m yardstick.fill [--instances NAME ...] [--problems order place spaces remat remat-twice offload]
                             [--states 6600] [--runs 26000000] [--seconds 40]

Every answer is judged by `yardstick.check` before it is written.
"""

from __future__ import annotations

import argparse
import fnmatch
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from itertools import chain, pairwise
from typing import Any

from yardstick.check import value_of
from yardstick.engines import Effort, Finding, findings, problems_of
from yardstick.files import ANSWERS, ROOT, instance, instance_names, key_of, rows, save, save_rows

Row = dict[str, Any]
_UNKNOWN = {"value": None, "found": None, "answer": None, "bound": None, "proved": None, "possible": True}
_RISING = ("remat-twice", "remat", "offload")  # the harder ones first: each allows all that the one before it does


def main() -> None:
    """Asks all that is asked for, and saves after each instance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", nargs="+", default=["*"], metavar="NAME", help="or patterns of names")
    parser.add_argument("--problems", nargs="+", metavar="PROBLEM")
    parser.add_argument("--states", type=int, default=Effort.max_states, help="of searches under limits; 0 for bounds alone")
    parser.add_argument("--runs", type=int, default=Effort.max_runs)
    parser.add_argument("--seconds", type=float, default=Effort.max_seconds)
    options = parser.parse_args()
    effort = Effort(options.states, options.runs, options.seconds)
    for name in instance_names():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in options.instances):
            continue
        asked = instance(name)
        for problem in problems_of(asked):
            if options.problems is None or problem in options.problems:
                found = list(findings(asked, problem, effort))
                record(asked, found)
                print(name, problem, f"{max(each.seconds for each in found):.1f} s", flush=True)


def record(asked: dict[str, Any], found: Sequence[Finding], by: str = "lowtide") -> None:
    """Takes into the table what is better than what it has. Raises AnswerError for an answer that is not valid."""
    table = {key_of(row): row for row in rows()}
    for each in chain(found, *(_handed_on(each, problems_of(asked)) for each in found)):
        row: Row = {"instance": each.instance, "problem": each.problem, "limit_bytes": each.limit_bytes}
        row = table.get(key_of(row), row | _UNKNOWN | {"values": {}, "bounds": {}})
        run = {"by": by, "how": each.how, "commit": commit(), "date": str(date.today()), "seconds": round(each.seconds, 1)}
        merge(asked, row, each, run)
        if row["value"] is not None or row["bound"] is not None or not row["possible"]:
            table[key_of(row)] = row
    save_rows(list(table.values()))


def _handed_on(found: Finding, problems: Sequence[str]) -> Iterator[Finding]:
    """The same for other problems at the same limit: an answer is one to an easier problem, a proof holds of a harder one."""
    for harder, easier in pairwise(_RISING):
        if found.problem == harder and easier in problems and found.answer is not None:
            yield replace(found, problem=easier, bound=None)
        if found.problem == easier and harder in problems and (found.bound is not None or not found.possible):
            yield replace(found, problem=harder, answer=None)


def merge(asked: dict[str, Any], row: Row, found: Finding, origin: dict[str, Any]) -> None:
    """A row with what was found, where that is better. Raises ValueError where what was proven impossible was found."""
    if not found.possible:
        row |= {"possible": False, "bound": None, "proved": origin, "bounds": {}}
    if not row["possible"]:
        if found.answer is not None or row["value"] is not None:
            raise ValueError(f"{found.instance}, {found.problem}, {found.limit_bytes}: proven impossible, and there is an answer")
        return
    sign = -1 if found.problem == "spaces" else 1
    if found.answer is not None:
        answer = {"instance": found.instance, "problem": found.problem, "limit_bytes": found.limit_bytes, **found.answer}
        value = value_of(asked, answer)
        row["values"][origin["by"]] = sign * min(sign * value, sign * row["values"].get(origin["by"], value))
        if row["value"] is None or sign * value < sign * row["value"]:
            limit = "" if found.limit_bytes is None else f".{found.limit_bytes}"
            row |= {"value": value, "found": origin, "answer": f"{found.instance}.{found.problem}{limit}.json.gz"}
            save(answer, ANSWERS / row["answer"])
    if found.bound is not None:
        row["bounds"][origin["by"]] = sign * max(sign * found.bound, sign * row["bounds"].get(origin["by"], found.bound))
    if found.bound is not None and (row["bound"] is None or sign * found.bound > sign * row["bound"]):
        row |= {"bound": found.bound, "proved": origin}


def commit() -> str:
    """The commit of the code that runs."""
    done = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
