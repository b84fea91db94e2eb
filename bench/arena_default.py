"""Is an arena ever a loss? Optimized steps with one over those without, on every network that fits, at two batch sizes.

    python -m bench.arena_default [--pairs 3] [--steps 8] [--only NAME ...]

Each training is a process of its own, on one thread; those that are compared take turns. An arena would be the default if it lost at most
2 % anywhere and its first steps cost at most a second. Ratios are medians over pairs of processes of the median step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import lowtide
from bench.models import MODELS
from bench.results import Results

COLUMNS = ("model", "batch_size", "without_ms", "with_ms", "wall_ratio", "cpu_ratio", "first_steps_s", "pairs", "steps")
NOTES = (
    "first_steps_s: what recording, planning and touching the arena add to the first three steps, over three later ones",
    "without and with: lowtide's own step by order alone, plain SGD; ratio: with an arena over without",
)
BATCH_SIZES = {name: (1, entry.batch_size) for name, entry in MODELS.items() if name != "gpt-neo-1.3B"}
_WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", nargs="+", default=list(BATCH_SIZES), choices=list(BATCH_SIZES), metavar="NAME")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # network, batch size, with an arena or not
    options = parser.parse_args()
    if options.one:
        name, batch_size, arena = options.one
        print(json.dumps(_trained(name, int(batch_size), arena == "with", options.steps)))
        return
    rows = []
    for name in options.only:
        for batch_size in sorted(set(BATCH_SIZES[name])):
            rows.append(row(name, batch_size, options.pairs, options.steps))
            print(rows[-1], flush=True)
            results = Results("arena_default", "Steps with an arena and without", COLUMNS, tuple(rows), NOTES)
            if options.only == list(BATCH_SIZES):
                results.save()
    results.print()


def row(name: str, batch_size: int, pairs: int, steps: int) -> dict[str, Any]:
    """One network at one batch size."""
    taken: dict[str, list[dict[str, float]]] = {"with": [], "without": []}
    for turn in range(pairs):
        for arena in ("with", "without") if turn % 2 else ("without", "with"):
            command = [sys.executable, "-m", "bench.arena_default", "--steps", str(steps), "--one", name, str(batch_size), arena]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            taken[arena].append(json.loads(done.stdout.splitlines()[-1]))

    def median(arena: str, key: str) -> float:
        return statistics.median(each[key] for each in taken[arena])

    def ratio(key: str) -> float:
        return statistics.median(ours[key] / theirs[key] for ours, theirs in zip(taken["with"], taken["without"], strict=True))

    return {
        "model": name,
        "batch_size": batch_size,
        "without_ms": median("without", "wall_ms"),
        "with_ms": median("with", "wall_ms"),
        "wall_ratio": ratio("wall_ms"),
        "cpu_ratio": ratio("cpu_ms"),
        "first_steps_s": median("with", "first_s") - median("without", "first_s"),
        "pairs": pairs,
        "steps": steps,
    }


def _trained(name: str, batch_size: int, arena: bool, steps: int) -> dict[str, float]:
    """The median step, and what the first steps take beyond it."""
    import torch

    from bench.models.workload import plain_sgd
    from lowtide import optimize

    torch.set_num_threads(1)
    made = MODELS[name].build(batch_size)
    step = optimize(
        made.model,
        made.batch,
        loss=made.loss,
        optimizer=plain_sgd(made.model),
        planning=lowtide.Planning(progress=False),
        run=lowtide.Run(arena="always" if arena else "never"),
    )
    samples = []
    for _ in range(_WARM_UP + steps):
        wall, cpu = time.perf_counter(), time.process_time()
        step(*made.batch)
        samples.append((time.perf_counter() - wall, time.process_time() - cpu))
    wall_s, cpu_s = (statistics.median(part) for part in zip(*samples[_WARM_UP:], strict=True))
    first_s = sum(cpu for _, cpu in samples[:_WARM_UP]) - _WARM_UP * cpu_s
    return {"wall_ms": wall_s * 1e3, "cpu_ms": cpu_s * 1e3, "first_s": first_s}


if __name__ == "__main__":
    main()
