"""How long the engines' own steps take on large inputs, and a team of threads on processors that others use: what no test can time.

    python -m bench.large_inputs

Each line says what is expected of an idle machine. What is quadratic takes minutes here.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import lowtide
from lowtide.cost.memory import simulate
from lowtide.problems.order import OrderProblem, Task

_NODES, _PLAYED, _CALLS, _OTHERS = 100_000, 5_000, 400, 3


def main() -> None:
    """Print each time beside what is expected."""
    _say("an ordering problem of 100,000 nodes is made", _seconds(lambda: _chain(_NODES)), "s, below 5")
    problem, order = _chain(_PLAYED), np.arange(_PLAYED, dtype=np.int32)
    simulate(problem, order)
    _say("5,000 nodes are played", 1e3 * min(_seconds(lambda: simulate(problem, order)) for _ in range(20)), "ms, below 1")
    if hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) > 1:
        _say("two threads beside three busy processes, over one thread alone", _busy_ratio(), "below 10")


def _chain(nodes: int) -> OrderProblem:
    tasks = [Task("op", makes=(node,), reads=tuple(range(max(0, node - 3), node))) for node in range(nodes)]
    return OrderProblem.of([64] * nodes, tasks, kept=[nodes - 1])


def _busy_ratio() -> float:
    """The median call of a small network by two threads whose processors others use too, over that by one thread."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    network = nn.Sequential(*[nn.Conv2d(16, 16, 1) for _ in range(40)]).eval().requires_grad_(False)
    x = torch.randn(1, 16, 12, 12)
    torch.set_num_threads(1)
    step = lowtide.optimize(network, (x,), exact=False, planning=lowtide.Planning(progress=False))
    alone = statistics.median(_seconds(lambda: step(x)) for _ in range(_CALLS))
    torch.set_num_threads(2)
    step(x)
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(_OTHERS)]
    try:
        return statistics.median(_seconds(lambda: step(x)) for _ in range(_CALLS)) / alone
    finally:
        for each in others:
            each.kill()
            each.wait()


def _seconds(do: Callable[[], Any]) -> float:
    start = time.perf_counter()
    do()
    return time.perf_counter() - start


def _say(what: str, number: float, expected: str) -> None:
    print(f"{what}: {number:.2f} ({expected})")


if __name__ == "__main__":
    main()
