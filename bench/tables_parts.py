"""What the sections of the results page are made of: tables, figures as text, and what a file was measured on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.results import RESULTS

APART = 0.03
NO_FIGURE = "readings disagree"
Row = Mapping[str, Any]
# Files that were saved before files held a commit: the last that had changed the package by then, and what is not as it was.
_EARLIER = {
    "budget": ("cffd48a", "the search has changed, and no clock ends it any more, as 60 seconds did"),
    "arena": ("46d3dcd", "how a step begins and ends in its arena has changed"),
    "model_paper": ("9e880e3", "orders are searched for with less effort, and capture and placers have changed"),
}

_PRODUCTS = "products ask for weights ahead, are taller where these come from afar, and do half vectors without a broadcast of their own"

# What is not as it was when a file that holds its commit was saved, as far as it bears on its figures.
_SINCE = {
    "magis_outer": "inner dimensions are cut, results of loops lie where arguments lay, up to 160 graphs are judged, in half the time",
    "magis_micro": "inner dimensions are cut as well, and results of loops may lie where arguments lay",
    "in_parts": "results of loops may lie where arguments lay, the search goes down in wide steps first, and the last column, which is "
    "over the same program with nothing computed again, will be over no limit",
    "stability": "nothing that changes its rows",
    "compiled": "nothing; rows of commits before wait longer for regions to be tried, and the oldest for each kernel to be compiled alone",
    "ago_tuning": _PRODUCTS,
    "ago_compiling": "the code that makes kernels has changed; rows of networks but MobileViT, EdgeNeXt and ConvNeXt are of commit 8d0bddd",
    "ago_others": "the code that makes kernels has changed; rows of networks but RepVGG, RegNetY and ResNet-18 are of commit f7d36fd",
    "place": "placers have changed for more than 100,000 buffers; rows but those of a million buffers are of commit 67ebfdd",
    "order_only": "capture and searches have changed; rows of batch 32 are of commit 62f458b and before",
    "algebra": "rules and searches have changed; the rows of GPT-2 are of commit b689608",
    "order_real": "capture has changed",
    "equal": "capture and planning have changed",
    "equal_limited": "capture and planning have changed",
    "dynamic_planned": "the members of a range have changed",
    "dynamic_foreign": "without a limit algebra is used only where it takes no longer at the shape at hand",
}


def section(
    title: str, name: str, command: str, text: str, head: Sequence[str] = (), lines: Iterable[Sequence[str]] = (), after: str = ""
) -> str:
    parts = [f"## {title}", text]
    if head:
        rows = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join([*parts, *([after] if after else []), f"`{command}`, `bench/results/{name}.json`. {_machine(name)}"])


def _machine(name: str) -> str:
    """What a file was measured on: machine, versions, code."""
    document = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    on = document["machine"]
    threads = f"{on['threads']} thread{'s' if on['threads'] > 1 else ''}"
    versions = f"Python {on['python']}, torch {on['torch']}, numba {on['numba']}"
    return f"{on['processor']}, {on['cores']} cores, {threads}, {versions}, {_code(name, document)}."


def _code(name: str, document: Row) -> str:
    if "code" in document:
        commit = f"commit {document['code']}" if document["code"] else "outside of a checkout"
        commit += _of_others(document)
        return f"{commit}. Since then {_SINCE[name]}" if name in _SINCE else commit
    commit, since = _EARLIER[name]
    return f"commit {commit}. Since then {since}"


def _of_others(document: Row) -> str:
    """The rows that a later save has kept, by their commit."""
    counts = Counter(row["code"] for row in document.get("rows", ()) if row.get("code", document["code"]) != document["code"])
    told = (f"{count} of {commit or 'a commit that was not noted'}" for commit, count in counts.most_common())
    return f" (of its {len(document['rows'])} rows {', '.join(told)})" if counts else ""


def ages() -> str:
    """Which saved table is of which commit, machine and torch."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if "machine" not in document:
            continue
        on = document["machine"]
        commit = document.get("code") or _EARLIER.get(path.stem, ("not noted",))[0]
        groups.setdefault((commit, ", ".join(filter(None, (on["processor"], on.get("gpu")))), on["torch"]), []).append(path.stem)
    lines = [[commit, machine, torch, ", ".join(names)] for (commit, machine, torch), names in sorted(groups.items())]
    table = "\n".join(f"| {' | '.join(row)} |" for row in [["commit", "machine", "torch", "tables"], ["---"] * 4, *lines])
    said = "one" if len(lines) == 1 else str(len(lines))
    return (
        "## Which table is of which commit\n\n"
        f"`make results` measures all tables that it can anew, on one machine and at one commit. These are of {said}.\n"
        "A commit with a plus had changes that were not committed. Each row of a file says of which commit it is, too.\n\n"
        f"{table}"
    )


def rows_of(name: str) -> list[Row]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def ratio(row: Row, base: Row, against: str) -> str:
    return if_agreed(row[f"wall_to_{against}"], row[f"cpu_to_{against}"], row["wall_ms"] / base["wall_ms"])


def agreed(row: Row, own_ms: str) -> str:
    return if_agreed(row["wall_ratio"], row["cpu_ratio"], row[own_ms] / row["eager_ms"])


def if_agreed(*readings: float) -> str:
    return f"{readings[0]:.2f}" if max(readings) - min(readings) <= APART else NO_FIGURE


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f}"


def overhead(ratio: float) -> str:
    return f"{round(ratio - 1, 4) + 0.0:+.1%}"  # no "-0.0%"


def percent(overhead: float | None) -> str:
    return "not found" if overhead is None else f"{overhead:+.1%}"
