"""Writes the tables of README.md from best.json and the instances.

python -m yardstick.table
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from yardstick.files import ROOT, SHARES, instance, limits_of, rows

PAGE = ROOT / "README.md"
START, END = "<!-- tables: written by python -m yardstick.table -->", "<!-- end of tables -->"
_LIMITED = {
    "remat-twice": "Recomputation within a limit, in the given order, each node at most twice (`remat-twice`)",
    "remat": "Recomputation within a limit (`remat`)",
    "offload": "Recomputation and offload within a limit (`offload`)",
}

Row = dict[str, Any]


def main() -> None:
    """Writes the page with tables as they should be."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def page(text: str) -> str:
    """A text with what stands between the two marks as it should be."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{tables(rows())}\n\n{END}{after}"


def tables(known: Sequence[Row]) -> str:
    """All tables, one a problem."""
    parts = [
        _plain("Order (`order`): peak in bytes", [row for row in known if row["problem"] == "order"], "nodes", "makes"),
        _plain("Placement in one space (`place`): arena in bytes", [row for row in known if row["problem"] == "place"], "buffers", "size"),
        _plain("Placement in two spaces (`spaces`): benefit", [row for row in known if row["problem"] == "spaces"], "buffers", "size"),
        *(_limited(title, [row for row in known if row["problem"] == problem]) for problem, title in _LIMITED.items()),
        _beside([row for row in known if row["problem"] == "remat-twice"]),
    ]
    return "\n\n".join(parts)


def _plain(title: str, known: Sequence[Row], noun: str, column: str) -> str:
    lines = []
    for row in known:
        count = len(instance(row["instance"])[column])
        gap = abs(row["value"] - row["bound"]) / row["bound"]
        said = "proven" if not gap else f"{gap:.2%}"
        lines.append((row["instance"], f"{count:,}", f"{row['value']:,}", f"{row['bound']:,}", said, row["found"]["by"]))
    return f"### {title}\n\n" + _table(("instance", noun, "best", "bound", "gap", "by"), lines)


def _limited(title: str, known: Sequence[Row]) -> str:
    lines = []
    for name in sorted({row["instance"] for row in known}):
        graph = instance(name)
        by_limit = {row["limit_bytes"]: row for row in known if row["instance"] == name}
        cells = [_cell(by_limit.get(limit), sum(graph["cost"])) for limit in limits_of(graph)]
        lines.append((name, f"{len(graph['makes']):,}", *cells))
    return f"### {title}\n\n" + _table(("instance", "nodes", *(f"{share} %" for share in SHARES)), lines)


def _beside(known: Sequence[Row]) -> str:
    """Where two methods were asked: what each found and proved, as time more than that of running every node once, in the graph's unit."""
    lines = []
    for row in known:
        methods = ("lowtide", "CP-SAT")
        if row["values"].keys() | row["bounds"].keys() >= set(methods):
            graph = instance(row["instance"])
            total, share = sum(graph["cost"]), SHARES[limits_of(graph).index(row["limit_bytes"])]
            figures = [found.get(method) for found in (row["values"], row["bounds"]) for method in methods]
            lines.append((row["instance"], f"{share} %", *("" if each is None else f"{each - total:,}" for each in figures)))
    title = "### Two methods beside each other (`remat-twice`): cost of second runs\n\n"
    return title + _table(("instance", "limit", "lowtide finds", "CP-SAT finds", "lowtide proves", "CP-SAT proves"), lines)


def _cell(row: Row | None, total: int) -> str:
    """The best time over that of running each node once, and the bound where that is another."""
    if row is None:
        return ""
    if not row["possible"]:
        return "none exists"
    bound = f"{row['bound'] / total - 1:.3%}"
    if row["value"] is None:
        return f"? ({bound})"
    mark = "" if row["found"]["by"] == "lowtide" else f" {row['found']['by']}"
    value = f"{row['value'] / total - 1:.3%}"
    return f"**{value}**{mark}" if row["value"] == row["bound"] else f"{value}{mark} ({bound})"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    align = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, align, *lines))


if __name__ == "__main__":
    main()
