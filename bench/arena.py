"""What an arena gives: the share of a step's requests that it serves, memory, time, and whether the numbers are eager's.

    python -m bench.arena [--pairs 5] [--steps 6] [--models NAME ...]

Every training runs in a process of its own. Eager and optimized processes take turns, and ratios are medians over pairs of the median
step: in one process the one would live on memory that the other has already fetched from the system.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lowtide
from bench.bits import same_bits
from bench.memory import touch_memory
from bench.models import MODELS
from bench.results import Results

CASES = {"resnet50": 4, "gpt2": 2, "bert-base": 2}  # gpt2: 2 x 256 tokens, bert-base: 2 x 128
COLUMNS = (
    "model", "batch_size", "requests", "served", "served_share", "planned_bytes", "bound_bytes", "growth_bytes", "growth_over_planned",
    "growth_from_start_bytes", "tensors", "different", "plan_s", "pairs", "steps", "eager_ms", "arena_ms", "wall_ratio", "cpu_ratio",
)  # fmt: skip
NOTES = (
    "served_share: by bytes, of all requests that were made while the step ran, those of other threads included",
    "growth: of the resident set over the last steps, from after the first step, which is recorded and has let all its memory go",
    "growth_from_start: from before the first step: with the code and the caches of kernels that ran for the first time",
    "different: of parameters, buffers and losses after three steps, how many are not eager's to the last bit",
    "plan_s: what the first planned step takes longer than the later ones",
    "ratios: with an arena over eager, medians over pairs of processes that take turns",
)
_WARM_UP = 3  # a step that is recorded, one that plans, one that touches the arena for the first time
_EQUAL_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(MODELS), metavar="NAME")
    parser.add_argument("--batch-size", type=int, help="instead of the model's own")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--one", nargs=3, metavar=("WHAT", "MODEL", "BATCH"), help="one measurement: for the process of its own")
    options = parser.parse_args()
    if options.one:
        what, name, batch_size = options.one
        print(json.dumps(_MEASUREMENTS[what](name, int(batch_size), options.steps)))
        return
    touch_memory()
    rows: list[dict[str, Any]] = []
    for name in options.models:
        batch_size = options.batch_size or CASES.get(name) or MODELS[name].batch_size
        rows.append(row(name, batch_size, options.pairs, options.steps))
        print(rows[-1], flush=True)
    results = Results("arena", "Training steps in an arena", COLUMNS, tuple(rows), NOTES)
    results.save()
    results.print()


def row(name: str, batch_size: int, pairs: int, steps: int) -> dict[str, Any]:
    """One model: equality, and pairs of processes, the first of each pair in turns."""
    taken: dict[str, list[dict[str, Any]]] = {"eager": [], "arena": []}
    equal = _in_its_own_process("equal", name, batch_size, steps)
    for turn in range(pairs):
        for what in ("eager", "arena") if turn % 2 else ("arena", "eager"):
            taken[what].append(_in_its_own_process(what, name, batch_size, steps))
    ratios = {
        key: statistics.median(ours[key] / theirs[key] for ours, theirs in zip(taken["arena"], taken["eager"], strict=True))
        for key in ("wall_ms", "cpu_ms")
    }
    ours = taken["arena"]
    served = min(ours, key=lambda each: each["served_share"])
    growth, from_start = (max(each[key] for each in ours) for key in ("growth_bytes", "growth_from_start_bytes"))
    return {"model": name, "batch_size": batch_size, "pairs": pairs, "steps": steps} | equal | {
        key: served[key] for key in ("requests", "served", "served_share", "planned_bytes", "bound_bytes")
    } | {
        "growth_bytes": growth,
        "growth_over_planned": growth / served["planned_bytes"],
        "growth_from_start_bytes": from_start,
        "plan_s": statistics.median(each["plan_s"] for each in ours),
        "eager_ms": statistics.median(each["wall_ms"] for each in taken["eager"]),
        "arena_ms": statistics.median(each["wall_ms"] for each in ours),
        "wall_ratio": ratios["wall_ms"],
        "cpu_ratio": ratios["cpu_ms"],
    }  # fmt: skip


def _in_its_own_process(what: str, name: str, batch_size: int, steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.arena", "--steps", str(steps), "--one", what, name, str(batch_size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def equal(name: str, batch_size: int, steps: int) -> dict[str, Any]:
    """Three steps, eager and in an arena, from the same seed: how many tensors differ."""
    expected, got = (_trained(name, batch_size, optimized) for optimized in (False, True))
    different = [key for key in expected | got if key not in expected or key not in got or not same_bits(expected[key], got[key])]
    return {"tensors": len(expected), "different": len(different)}


def eager(name: str, batch_size: int, steps: int) -> dict[str, Any]:
    """The median step of eager training."""
    call, _, _ = _training(name, batch_size, optimized=False)
    return _timed([_seconds(call) for _ in range(_WARM_UP + steps)])


def arena(name: str, batch_size: int, steps: int) -> dict[str, Any]:
    """The median step of training in an arena, what the arena served, and how the process grew."""
    call, step, _ = _training(name, batch_size, optimized=True)
    start = _resident_bytes()
    samples = [_seconds(call)]
    recorded = _resident_bytes()
    samples += [_seconds(call) for _ in range(_WARM_UP + steps - 1)]
    end, report = _resident_bytes(), step.arena
    return _timed(samples) | {
        "growth_bytes": end - recorded,
        "growth_from_start_bytes": end - start,
        "requests": report.last.requests + report.last.elsewhere,
        "served": report.last.served,
        "served_share": report.served_share,
        "planned_bytes": report.planned_bytes,
        "bound_bytes": report.lower_bound_bytes,
        "plan_s": samples[1][0] - _timed(samples)["wall_ms"] / 1e3,
    }


_MEASUREMENTS: dict[str, Callable[[str, int, int], dict[str, Any]]] = {"equal": equal, "eager": eager, "arena": arena}


def _trained(name: str, batch_size: int, optimized: bool) -> dict[str, torch.Tensor]:
    """All that training leaves, by name."""
    call, _, model = _training(name, batch_size, optimized)
    torch.manual_seed(1)
    losses = [call() for _ in range(_EQUAL_STEPS)]
    found = {f"loss {index}": loss for index, loss in enumerate(losses)} | {"random state": torch.get_rng_state()}
    return found | {f"model {key}": tensor for key, tensor in model.state_dict().items()}


def _training(name: str, batch_size: int, optimized: bool) -> tuple[Callable[[], Any], Any, Any]:
    """What runs one step, the optimized step, and the model."""
    from bench.models.workload import plain_sgd
    from lowtide import optimize
    from lowtide.api.compare import Workload, eager_step

    made = MODELS[name].build(batch_size)
    work = Workload(made.model, made.batch, made.loss, plain_sgd(made.model))
    if not optimized:
        return eager_step(work), None, work.model
    step = optimize(
        work.model,
        work.batch,
        loss=work.loss,
        optimizer=work.optimizer,
        planning=lowtide.Planning(progress=False),
        run=lowtide.Run(arena="always"),
    )
    return lambda: step(*work.batch), step, work.model


def _timed(samples: list[tuple[float, float]]) -> dict[str, float]:
    wall, cpu = zip(*samples[_WARM_UP:], strict=True)
    return {"wall_ms": statistics.median(wall) * 1e3, "cpu_ms": statistics.median(cpu) * 1e3}


def _seconds(call: Callable[[], Any]) -> tuple[float, float]:
    """Wall-clock and processor seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def _resident_bytes() -> int:
    """The process's resident set, without what the C library keeps of freed memory."""
    ctypes.CDLL(None).malloc_trim(0)
    told = Path("/proc/self/status").read_text(encoding="utf-8").split("VmRSS:")[1]
    return int(told.split()[0]) * 1024


if __name__ == "__main__":
    main()
