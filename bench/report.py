"""The page of a plan: how large it is, how long it takes to write, and how long a browser takes to open it.

    python -m bench.report [--operators 200 1000 5000]

Plans are of made-up training steps: a chain forward and back, with a limit at half of its activations. Opening is measured by the
browser itself, from the begin of the navigation to the end of the load event, the page's script included; it needs Chromium.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.results import Results
from lowtide.ir.graph import Graph, Kind, Node, Source, Storage, Value
from lowtide.plan.plan import Plan, Provenance
from lowtide.planning.candidate import Candidate
from lowtide.planning.planner import Planner
from lowtide.planning.request import Budget, Request, sweeps_of
from lowtide.report import page

COLUMNS = ("operators", "tensors", "page_bytes", "write_s", "open_ms")
_OPENINGS = 3
_NBYTES = 4096
_TIMED = (
    "<script>addEventListener('load', () => setTimeout(() => {"
    "document.title = performance.timing.loadEventEnd - performance.timing.navigationStart }))</script>"
)
_QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
)  # fmt: skip
NOTES = ("write_s: the median of three; open_ms: of the browser's own measurements, with the page's script",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", nargs="+", type=int, default=[200, 1000, 5000])
    options = parser.parse_args()
    results = Results("report", "The page of a plan", COLUMNS, tuple(map(row, options.operators)), NOTES)
    results.save()
    results.print()


def row(operators: int) -> dict[str, Any]:
    """One plan."""
    plan = chain_plan(operators)
    page(plan)  # kernels are compiled, and the template is read
    taken = []
    for _ in range(_OPENINGS):
        start = time.perf_counter()
        text = page(plan)
        taken.append(time.perf_counter() - start)
    return {
        "operators": len(plan.order),
        "tensors": len({value.storage for node in plan.graph.nodes for value in node.results}),
        "page_bytes": len(text.encode()),
        "write_s": statistics.median(taken),
        "open_ms": opened_ms(text),
    }


def chain_plan(operators: int) -> Plan:
    """Of a chain forward and back, within half of its peak."""
    graph = _chain(operators // 2)
    candidate = Candidate(graph, (0,) * len(graph.nodes), tuple(1.0 + index % 7 for index in range(len(graph.nodes))))
    provenance = Provenance("bench", "none", "cpu", "none", 1)
    budget = Budget(candidate.eager(1).peak_bytes // 2)
    return Planner([[candidate]]).plans(Request(provenance, budget, sweeps=sweeps_of("quick", None)))[-1]


def _chain(count: int) -> Graph:
    values, nodes = [_value("x", Kind.INPUT)], []
    for index in range(count):
        values.append(_value(f"a{index}", Kind.ACTIVATION))
        nodes.append(_node((values[-2],), values[-1], f"layers.{index * 24 // count}.mlp", index))
    gradient = values[-1]
    for index in reversed(range(count)):
        made = _value(f"g{index}", Kind.GRADIENT)
        nodes.append(_node((gradient, values[index]), made, f"layers.{index * 24 // count}.mlp", index))
        gradient = made
    return Graph((values[0],), tuple(nodes), (gradient,))


def _value(name: str, kind: Kind) -> Value:
    return Value(name, Storage(name, _NBYTES, "cpu", kind), "uint8", (_NBYTES,), (1,))


def _node(args: tuple[Value, ...], made: Value, module: str, line: int) -> Node:
    return Node("aten.make.default", args, (made,), source=Source("model.py", line + 1, module))


def opened_ms(text: str) -> float | None:
    """How long Chromium takes to open a page; None where there is none."""
    if shutil.which("chromium") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.html"
        path.write_text(text.replace("</body>", f"{_TIMED}</body>"), encoding="utf-8")
        return statistics.median(_opened_ms(path) for _ in range(_OPENINGS))


def _opened_ms(path: Path) -> float:
    command = [
        "chromium",
        *_QUIET,
        f"--user-data-dir={path.parent / 'browser'}",
        "--virtual-time-budget=10000",
        "--dump-dom",
        f"file://{path}",
    ]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    title = re.search(r"<title>(\d+)</title>", shown)
    assert title is not None, "the page tells how long it took"
    return float(title[1])


if __name__ == "__main__":
    main()
