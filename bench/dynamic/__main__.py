"""Trains in all ways, each beside eager, and writes the table.

    python -m bench.dynamic [--sizes 16 8 4] [--seconds 600] [--row-seconds 150] [--fresh]

A row is one way at one batch size: its process and eager's, which step in turns, so that what the machine does meanwhile is in both. It is
written when it is done, and a run that was stopped, or whose seconds are over, goes on where it ended; `--fresh` begins anew. A way that
has not been through all batches once after its seconds has a row that says so.

The limit is a share of what eager takes for the heaviest batch of the largest size, so that whoever cannot keep one is over it there. A
CPU's allocator has no limit: a way is over it whose measured peak is. Tokens a second are of tokens that count, over a second time
through all batches; seconds until the first step, and for the first time through, include all that is compiled, captured, measured and
planned, from caches that are empty but for lowtide's compiled kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from bench.dynamic.lengths import CHARACTERS_A_TOKEN, LONGEST, SHORTEST
from bench.dynamic.task import Task
from bench.dynamic.variants import VARIANTS
from bench.dynamic.workers import Worker
from bench.machine import code
from bench.memory import touch_memory
from bench.results import RESULTS, Cell, Results, load

COLUMNS = (
    "batch_size", "variant", "tokens_per_s", "against_eager", "peak_bytes", "limit_bytes", "within",
    "compilations", "first_step_s", "first_pass_s", "failed",
)  # fmt: skip
_EAGER = next(iter(VARIANTS))
_SLOW_TO_COMPILE = "torch.compile, powers of two"  # a program for each power: the last rows
NOTES = (
    f"Llama of 4 layers, hidden 256, vocabulary 4,000, float32, AdamW; samples of {SHORTEST} to {LONGEST} tokens, drawn from a histogram"
    f" in the shape of CodeAlpaca-20K's, made by hand, one token for {CHARACTERS_A_TOKEN} characters",
    "tokens_per_s: of tokens that count, padding does not; a second time through all batches, ways in turns",
    "against_eager: tokens a second over those of eager in turns with this way, batch by batch",
    "peak_bytes: allocator-measured, for the heaviest batch, with parameters and optimizer state; limit_bytes: a share of eager's at the"
    " largest batch size; a CPU has no allocator limit, so `within` compares the two",
    "first_step_s, first_pass_s: with all that is compiled, captured, measured and planned; own caches, empty at first",
    "BladeDISC++'s method: research.eviction in the better of two orders, what it ran executed by lowtide's programs; the time of"
    " its decisions at run time is not in its tokens_per_s, and its compilations are one for each shape where the paper's is one in all",
    "failed: why a row has no numbers; a way gets so many seconds for its first time through, as `bench.dynamic --row-seconds` says",
)


@dataclass(frozen=True)
class Settings:
    """How much is run."""

    sizes: tuple[int, ...]
    variants: tuple[str, ...]
    steps: int
    rounds: int
    share: float
    threads: int
    seconds: float  # of all rows; one that is begun is finished
    row_seconds: float  # of a way's first time through all batches
    fresh: bool  # rows of the saved table are measured again
    quick: bool  # a trial, of which nothing is kept


def main() -> None:
    settings = _settings()
    begun = time.perf_counter()
    touch_memory()
    saved = () if settings.fresh or settings.quick else _saved()
    known = next((row["limit_bytes"] for row in saved if row.get("limit_bytes")), None)
    limit_bytes = known if isinstance(known, int) else _limit_bytes(settings)
    print(f"limit: {limit_bytes} bytes", flush=True)
    rows = [row for row in saved if row["limit_bytes"] == limit_bytes]
    pairs = [(size, name) for size in settings.sizes for name in settings.variants]
    for size, name in sorted(pairs, key=lambda pair: pair[1] == _SLOW_TO_COMPILE):
        if any((row["batch_size"], row["variant"]) == (size, name) for row in rows):
            continue
        if time.perf_counter() - begun > settings.seconds:
            print(f"{settings.seconds:.0f} seconds are over; the same command goes on with batch size {size}, {name}")
            break
        rows.append(row_of(size, name, settings, limit_bytes))
        print(rows[-1], flush=True)
        notes = (*NOTES, f"{settings.steps} batches of each size; {settings.threads} threads")
        results = Results("dynamic", "Training on batches of varying lengths, under a limit", COLUMNS, tuple(rows), notes)
        if not settings.quick:
            results.save()
    Results("dynamic", "Training on batches of varying lengths, under a limit", COLUMNS, tuple(rows), NOTES).print()


def _settings() -> Settings:
    parser = argparse.ArgumentParser(prog="bench.dynamic", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small batch size, few steps, nothing compiled by torch.compile")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 8, 4])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1, help="how often all batches are stepped through for tokens a second")
    parser.add_argument("--share", type=float, default=0.6, help="the limit, as a share of eager's peak at the largest batch size")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=600.0, help="after which no further row is begun")
    parser.add_argument("--row-seconds", type=float, default=150.0, help="that a way may take for its first time through")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="WAY", help="some alone")
    parser.add_argument("--fresh", action="store_true", help="measure the rows of the saved table again")
    asked = parser.parse_args()
    variants = tuple(each for each in asked.variants if not (asked.quick and each.startswith("torch.compile")))
    sizes, steps = ((4,), 3) if asked.quick else (tuple(asked.sizes), asked.steps)
    limits = asked.seconds, asked.row_seconds
    return Settings(sizes, variants, steps, asked.rounds, asked.share, asked.threads, *limits, asked.fresh, asked.quick)


def _saved() -> tuple[Mapping[str, Cell], ...]:
    """The rows that were measured with the code as it is; those of other code are measured again."""
    path = RESULTS / "dynamic.json"
    if not path.exists() or json.loads(path.read_text(encoding="utf-8"))["code"] != code():
        return ()
    return load("dynamic").rows


def _limit_bytes(settings: Settings) -> int:
    """A share of eager's peak for the heaviest batch of the largest size."""
    task = Task(max(settings.sizes), settings.steps)
    worker = Worker(_EAGER, task, 0, settings.threads)
    peak = worker.peak_bytes(task.heaviest()) if worker.start(settings.row_seconds) else None
    worker.close()
    if peak is None:
        raise RuntimeError(f"expected eager to train, got: {worker.failed}")
    return int(settings.share * peak)


def row_of(size: int, name: str, settings: Settings, limit_bytes: int) -> dict[str, Cell]:
    """One way at one batch size, beside eager."""
    task = Task(size, settings.steps)
    workers = [Worker(name, task, limit_bytes, settings.threads)]
    try:
        workers[0].start(settings.row_seconds)
        if name != _EAGER and not workers[0].failed:
            workers.append(Worker(_EAGER, task, limit_bytes, settings.threads))
            workers[1].start(settings.row_seconds)
        _take_turns([each for each in workers if not each.failed], settings)
        row = _row(workers[0], task, limit_bytes)
        if not workers[0].failed and not workers[-1].failed:
            mine, eager = (_seconds(each) for each in (workers[0], workers[-1]))
            row["against_eager"] = eager / mine
        return row
    finally:
        for worker in workers:
            worker.close()


def _take_turns(workers: Sequence[Worker], settings: Settings) -> None:
    """Batch by batch, another way first each time."""
    for turn in range(settings.rounds):
        for worker in workers:
            worker.seconds.append([])
        for index in range(settings.steps):
            first = (turn + index) % max(1, len(workers))
            for worker in (*workers[first:], *workers[:first]):
                worker.seconds[-1].append(worker.step(index, settings.row_seconds))


def _seconds(worker: Worker) -> float:
    """Of all batches: of each the median of its rounds."""
    return sum(map(statistics.median, zip(*worker.seconds, strict=True)))


def _row(worker: Worker, task: Task, limit_bytes: int) -> dict[str, Cell]:
    row: dict[str, Cell] = {"batch_size": task.batch_size, "variant": worker.name, "limit_bytes": limit_bytes}
    peak = worker.peak_bytes(task.heaviest())
    if worker.failed or worker.started is None or peak is None:
        return row | {"failed": worker.failed}
    return row | {
        "tokens_per_s": task.tokens / _seconds(worker),
        "peak_bytes": peak,
        "within": "within" if peak <= limit_bytes else "over the limit",
        "compilations": worker.started.compilations,
        "first_step_s": worker.started.first_s,
        "first_pass_s": worker.started.all_s,
    }


if __name__ == "__main__":
    main()
