"""Makes instances of published files, as they lie in the folders `place`, `order` and `remat` of a data folder.

    python -m yardstick.published [FOLDER]
Where the files come from is said in each instance ("source", "licence") and in README.md. Nothing of lowtide is imported.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from yardstick.files import ROOT, save_instance

DATA = ROOT.parents[1] / "shared" / "data"
_CAPACITY = re.compile(r"\.\d+$")  # that is known to suffice: a part of some files' names
_MINIMALLOC = ("google/minimalloc, benchmarks/", "Apache-2.0")
_IDEALLOC = ("by way of cappadokes/idealloc, benchmarks/", "MIT")
_FAST_SHARE = 2  # the fast space holds one part in so many of what is alive at most
_TWO_SPACES = ("A", "E", "K", "somas-resnet50", "iopddl-G_1")


def main(arguments: list[str]) -> None:
    """Writes all instances."""
    data = Path(arguments[0]) if arguments else DATA
    documents = [*placements(data / "place"), *orders(data / "order"), *recomputations(data / "remat")]
    if not documents:
        raise SystemExit(f"expected files in place, order and remat of {data}, found none")
    for document in documents:
        save_instance(document)


def placements(folder: Path) -> Iterator[dict[str, Any]]:
    """Buffers, and some of them once more over two spaces."""
    for path in sorted(folder.glob("*.csv")):
        name = _CAPACITY.sub("", path.stem)
        if name == "example":
            continue
        with open(path, encoding="utf-8", newline="") as file:
            table = list(csv.DictReader(file))
        size, start, end = ([int(row[column]) for row in table] for column in ("size", "lower", "upper"))
        source, licence = _MINIMALLOC if len(name) == 1 else _IDEALLOC
        columns = {"source": f"{source}{path.name}", "licence": licence, "size": size, "start": start, "end": end}
        yield {"format": "yardstick.buffers", "name": f"place-{name}", **columns}
        if name in _TWO_SPACES:
            fast = most_alive(size, start, end) // _FAST_SHARE
            spaces = {"spaces": [fast, None], "allowed": [[0, 1]] * len(size), "benefit": size}
            yield {"format": "yardstick.buffers", "name": f"spaces-{name}", **columns, **spaces}


def most_alive(size: list[int], start: list[int], end: list[int]) -> int:
    """The most bytes alive at one step."""
    events = sorted(
        [(at, nbytes) for at, nbytes in zip(start, size, strict=True)] + [(at, -nbytes) for at, nbytes in zip(end, size, strict=True)]
    )
    most = live = 0
    for _, change in events:
        live += change
        most = max(most, live)
    return most


def orders(folder: Path) -> Iterator[dict[str, Any]]:
    """Networks rebuilt by their shapes. An input is a tensor that no node makes; what nobody reads is kept."""
    for path in sorted(folder.glob("*.json")):
        items = json.loads(path.read_text(encoding="utf-8"))["nodes"]
        read = {tensor for item in items for tensor in item["inputs"]}
        nodes = [(tensor, item) for tensor, item in enumerate(items) if item["op"] != "Input"]
        alike = [
            [each for each in item["inputs"] if items[each]["bytes"] == item["bytes"]][:1] if item["inplace"] else [] for _, item in nodes
        ]
        yield {
            "format": "yardstick.graph",
            "name": f"order-{path.stem}",
            "source": "lowtide: rebuilt by shape from the published network, float32, batch 1",
            "licence": "Apache-2.0",
            "bytes": [item["bytes"] for item in items],
            "kept": [tensor for tensor in range(len(items)) if tensor not in read],
            "makes": [[tensor] for tensor, _ in nodes],
            "reads": [sorted(set(item["inputs"])) for _, item in nodes],
            "takes": alike,
        }


def recomputations(folder: Path) -> Iterator[dict[str, Any]]:
    """The graphs of Checkmate and MOCCASIN: node i makes tensor i."""
    for path in sorted(folder.glob("*.json")):
        graph = json.loads(path.read_text(encoding="utf-8"))
        reads: list[list[int]] = [[] for _ in graph["cost"]]
        for before, after in graph["edges"]:
            reads[after].append(before)
        yield {
            "format": "yardstick.graph",
            "name": f"remat-{path.stem}",
            "source": "haoming-codes/moccasin, data/: the graphs of Checkmate (MLSys 2020) and MOCCASIN (ICML 2023)",
            "licence": "none stated",
            "bytes": graph["bytes"],
            "makes": [[node] for node in range(len(graph["cost"]))],
            "reads": [sorted(set(row)) for row in reads],
            "cost": graph["cost"],
        }


if __name__ == "__main__":
    main(sys.argv[1:])
