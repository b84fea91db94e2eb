"""Where instances, answers and the table of best values lie, and how they are written: the same content gives the same bytes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from yardstick.check import load, peak_of

ROOT = Path(__file__).parent
INSTANCES, ANSWERS, BEST = ROOT / "instances", ROOT / "answers", ROOT / "best.json"
SHARES = (90, 80, 60, 40, 20)  # of the peak of the given order, in percent: the limits of sequences
_NO_TIME = 0  # in the header, which would differ from run to run


def instance(name: str) -> dict[str, Any]:
    """An instance by its name."""
    return load(str(INSTANCES / f"{name}.json.gz"))


def instance_names() -> list[str]:
    """All instances that are here."""
    return sorted(path.name.removesuffix(".json.gz") for path in INSTANCES.glob("*.json.gz"))


def save(document: Mapping[str, Any], path: Path) -> None:
    """Writes JSON without spaces, compressed, as a whole."""
    path.parent.mkdir(exist_ok=True)
    text = json.dumps(document, separators=(",", ":")).encode()
    part = path.with_suffix(".part")
    part.write_bytes(gzip.compress(text, mtime=_NO_TIME))
    part.replace(path)


def save_instance(document: Mapping[str, Any]) -> None:
    """Writes an instance under its name."""
    save(document, INSTANCES / f"{document['name']}.json.gz")


def rows() -> list[dict[str, Any]]:
    """The rows of the table of best values."""
    found: list[dict[str, Any]] = load(str(BEST))["rows"] if BEST.exists() else []
    return found


def save_rows(rows: list[dict[str, Any]]) -> None:
    """Writes the table, one row a line, by instance, problem and limit."""
    ordered = sorted(rows, key=key_of)
    lines = ",\n".join(json.dumps(row) for row in ordered)
    part = BEST.with_suffix(".part")
    part.write_text(f'{{"rows": [\n{lines}\n]}}\n', encoding="utf-8")
    part.replace(BEST)


def key_of(row: Mapping[str, Any]) -> tuple[str, str, int]:
    """What a row is of: its instance, its problem, and its limit, larger ones first."""
    return row["instance"], row["problem"], -(row["limit_bytes"] or 0)


def answers() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each row that has an answer, and that answer."""
    for row in rows():
        if row["answer"]:
            yield row, load(str(ANSWERS / row["answer"]))


def limits_of(graph: Mapping[str, Any]) -> list[int]:
    """The limit at each of the shares, in bytes."""
    peak = peak_of(dict(graph), [["run", node] for node in range(len(graph["makes"]))])
    return [peak * share // 100 for share in SHARES]
