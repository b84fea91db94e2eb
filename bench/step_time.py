"""Is it free? Step times of eager and optimized training, in pairs of processes, as wall-clock and as processor time.

    python -m bench.step_time [--models resnet50 gpt2] [--pairs 6] [--steps 6]

Each training is a process of its own, and the two take turns: in one process they would share a heap, where each lives on memory that the
other has already fetched from the system, and page faults decide who looks fast. Ratios are medians over pairs of the median step, with the
least and the most of them. Models that are not named keep their rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import lowtide
from bench.memory import touch_memory
from bench.models import MODELS
from bench.results import Results, load

CASES = {"resnet50": 8, "gpt2": 2}  # batch sizes; gpt2: of 256 tokens
COLUMNS = (
    "model", "batch_size", "pairs", "steps", "eager_ms", "lowtide_ms", "wall_ratio", "least_wall_ratio", "most_wall_ratio", "cpu_ratio",
)  # fmt: skip
_WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--one", nargs=3, metavar=("WHICH", "MODEL", "BATCH"), help="time one training: for the process of its own")
    options = parser.parse_args()
    if options.one:
        which, name, batch_size = options.one
        print(json.dumps(timed(which, name, int(batch_size), options.steps)))
        return
    touch_memory()
    rows = {line["model"]: line for line in load("step_time").rows} if options.models != list(CASES) else {}
    rows |= {name: row(name, CASES[name], options.pairs, options.steps) for name in options.models}
    results = Results("step_time", "Step time, eager and optimized", COLUMNS, tuple(rows.values()), NOTES)
    results.save()
    results.print()


NOTES = (
    "ratios: lowtide over eager, medians over pairs of processes that take turns; wall-clock also the least and the most of the pairs",
)


def row(name: str, batch_size: int, pairs: int, steps: int) -> dict[str, Any]:
    """One model: pairs of processes, the first of each pair in turns."""
    taken: dict[str, list[dict[str, float]]] = {"eager": [], "lowtide": []}
    for turn in range(pairs):
        for which in ("eager", "lowtide") if turn % 2 else ("lowtide", "eager"):
            command = [sys.executable, "-m", "bench.step_time", "--steps", str(steps), "--one", which, name, str(batch_size)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            taken[which].append(json.loads(done.stdout.strip().splitlines()[-1]))
    ratios = {
        key: [ours[key] / theirs[key] for ours, theirs in zip(taken["lowtide"], taken["eager"], strict=True)]
        for key in ("wall_ms", "cpu_ms")
    }
    middle = {which: {key: statistics.median(each[key] for each in runs) for key in runs[0]} for which, runs in taken.items()}
    return {
        "model": name,
        "batch_size": batch_size,
        "pairs": pairs,
        "steps": steps,
        "eager_ms": middle["eager"]["wall_ms"],
        "lowtide_ms": middle["lowtide"]["wall_ms"],
        "wall_ratio": statistics.median(ratios["wall_ms"]),
        "least_wall_ratio": min(ratios["wall_ms"]),
        "most_wall_ratio": max(ratios["wall_ms"]),
        "cpu_ratio": statistics.median(ratios["cpu_ms"]),
    }


def timed(which: str, name: str, batch_size: int, steps: int) -> dict[str, float]:
    """The median step of one training."""
    call = _training(which, name, batch_size)
    samples = [_seconds(call) for _ in range(_WARM_UP + steps)][_WARM_UP:]
    return {
        "wall_ms": statistics.median(wall for wall, _ in samples) * 1e3,
        "cpu_ms": statistics.median(cpu for _, cpu in samples) * 1e3,
    }


def _training(which: str, name: str, batch_size: int) -> Callable[[], Any]:
    from bench.models.workload import plain_sgd
    from lowtide import optimize
    from lowtide.api.compare import Workload, eager_step

    made = MODELS[name].build(batch_size)
    work = Workload(made.model, made.batch, made.loss, plain_sgd(made.model))
    if which == "eager":
        return eager_step(work)
    step = optimize(work.model, work.batch, loss=work.loss, optimizer=work.optimizer, planning=lowtide.Planning(progress=False))
    return lambda: step(*work.batch)


def _seconds(call: Callable[[], Any]) -> tuple[float, float]:
    """Wall-clock and processor seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
