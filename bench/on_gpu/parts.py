"""The parts in the order of worth: what is cut off loses least."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from bench.on_gpu import exact, graphed, large, limits, rates
from bench.on_gpu.ground import Ground, Row

_TESTS_SECONDS = 300


@dataclass(frozen=True)
class Part:
    """Something to measure, and the most seconds that it may take."""

    name: str
    rows: Callable[[Ground], Iterator[Row]]
    seconds: int


def _tests(ground: Ground) -> Iterator[Row]:
    """The tests that need a GPU; elsewhere all of them are skipped."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TESTS_SECONDS, check=False)
    lines = done.stdout.strip().splitlines() or [""]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    yield {"verdict": "passed" if done.returncode == 0 else "failed", "why": "; ".join([lines[-1], *failed])[:2000]}


PARTS: tuple[Part, ...] = (
    Part("tests", _tests, _TESTS_SECONDS),
    *(Part(case.name, partial(exact.rows, case), 120) for case in exact.CASES),
    *(Part(f"limits: {each.name}", partial(limits.rows, each), 240) for each in limits.NETWORKS),
    Part("rates", rates.rows, 90),
    *(
        Part(f"limits: {each.name}, {peer}", partial(limits.peer_rows, each, peer), 150)
        for each in limits.NETWORKS
        for peer in limits.PEERS
    ),
    *(Part(f"graph: {name}", partial(graphed.rows, name, batch, stand_in), 120) for name, batch, stand_in in graphed.CASES),
    *(Part(f"7B: {what}, {gib} GiB", partial(large.rows, what, gib), 240) for what in ("LoRA", "whole") for gib in large.LIMITS_GIB),
)
