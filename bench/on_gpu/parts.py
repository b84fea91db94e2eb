"""The parts in the order of worth: what is cut off loses least."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from bench.on_gpu import exact, graphed, large, limits, rates, survival, worth
from bench.on_gpu.ground import Ground, Row

KERNELS = "kernels"  # that others find compiled


@dataclass(frozen=True)
class Part:
    """Something to measure, and the most seconds that it may take."""

    name: str
    rows: Callable[[Ground], Iterator[Row]]
    seconds: int
    gib: int = 4  # of the device's memory that its process holds while others run
    plans: bool = True  # so that it waits until kernels are compiled


def _tests(ground: Ground) -> Iterator[Row]:
    """The tests that need a GPU; elsewhere all of them are skipped."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/gpu"]
    with ground.alone():
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or [""]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    yield {"verdict": "passed" if done.returncode == 0 else "failed", "why": "; ".join([lines[-1], *failed])[:2000]}


def _kernels(ground: Ground) -> Iterator[Row]:
    """Those of planning, compiled or loaded."""
    from lowtide.planning.warm_up import warm_up_planning
    from lowtide.schedule import Auto

    warm_up_planning(Auto(), limited=True)
    yield {"verdict": "measured"}


def _steps(network: limits.Network, *peers: str) -> Iterator[Part]:
    """Limits of one network, then what people use."""
    if not peers:
        yield Part(f"limits: {network.name}", partial(limits.rows, network), 300, network.gib)
    for peer in peers:
        yield Part(f"peers: {network.name}, {peer}", partial(limits.peer_rows, network, peer), 200, network.gib, plans=False)


PARTS: tuple[Part, ...] = (
    Part(KERNELS, _kernels, 120, 0, plans=False),
    *(Part(case.name, partial(exact.rows, case), 120) for case in exact.CASES),
    *(part for each in limits.NETWORKS for part in _steps(each)),
    *(Part(f"survival: {each.name}", partial(survival.part_rows, each), 150) for each in survival.FIRST),
    Part(f"worth: {limits.NETWORKS[0].name}", partial(worth.rows, limits.NETWORKS[0]), 240, 20),
    *(part for each in limits.NETWORKS for part in _steps(each, "inductor", "checkpoint")),
    *(Part(f"graph: {name}", partial(graphed.rows, name, batch, stand_in), 120) for name, batch, stand_in in graphed.CASES),
    *(part for each in limits.NETWORKS for part in _steps(each, "save_on_cpu")),
    Part("tests", _tests, 200),
    Part("rates", rates.rows, 90),
    *(Part(f"7B: {what}, {gib} GiB", partial(large.rows, what, gib), 240, 60) for what in ("LoRA", "whole") for gib in large.LIMITS_GIB),
)
