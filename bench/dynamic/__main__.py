"""Trains in all ways, in turns, and writes the table.

The limit is a share of what eager takes for the heaviest batch of the largest size, so that whoever cannot keep one is over it there. A
CPU's allocator has no limit: a way is over it whose measured peak is. Tokens a second are of tokens that count, over a second time
through all batches, on which the ways take turns batch by batch; seconds until the first step, and for the first time through, include
all that is compiled, captured, measured and planned, from caches that are empty but for lowtide's compiled kernels.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.dynamic.lengths import CHARACTERS_A_TOKEN, LONGEST, SHORTEST
from bench.dynamic.task import Task
from bench.dynamic.variants import VARIANTS
from bench.dynamic.workers import Worker
from bench.memory import touch_memory
from bench.results import Cell, Results, with_kept

COLUMNS = (
    "batch_size", "variant", "tokens_per_s", "against_eager", "peak_bytes", "limit_bytes", "within",
    "compilations", "first_step_s", "first_pass_s", "failed",
)  # fmt: skip
_EAGER, *_OTHERS = VARIANTS
_SLOW_TO_COMPILE = "torch.compile, powers of two"
NOTES = (
    f"Llama of 4 layers, hidden 256, vocabulary 4,000, float32, AdamW; samples of {SHORTEST} to {LONGEST} tokens, drawn from a histogram"
    f" in the shape of CodeAlpaca-20K's, made by hand, one token for {CHARACTERS_A_TOKEN} characters",
    "tokens_per_s: of tokens that count, padding does not; a second time through all batches, ways in turns",
    "against_eager: tokens a second over eager's of the same run; where ways are measured in several runs, eager takes its turns in each",
    "peak_bytes: allocator-measured, for the heaviest batch, with parameters and optimizer state; limit_bytes: a share of eager's at the"
    " largest batch size; a CPU has no allocator limit, so `within` compares the two",
    "first_step_s, first_pass_s: with all that is compiled, captured, measured and planned; own caches, empty at first",
    "BladeDISC++'s method: lowtide.reference.eviction in the better of two orders, what it ran executed by lowtide's programs; the time of"
    " its decisions at run time is not in its tokens_per_s, and its compilations are one for each shape where the paper's is one in all",
    f"{_SLOW_TO_COMPILE}: at the largest batch size alone, unless asked for, since each bucket compiles anew",
)


@dataclass(frozen=True)
class Settings:
    """How much is run."""

    sizes: tuple[int, ...]
    steps: int
    rounds: int
    share: float
    threads: int
    patience_s: float
    variants: tuple[str, ...]
    quick: bool  # a trial, of which nothing is kept
    keep: bool  # rows of the saved table that are not measured now
    limit_bytes: int | None  # where it was found earlier


def main() -> None:
    settings = _settings()
    touch_memory()
    limit_bytes = settings.limit_bytes or _limit_bytes(settings)
    print(f"limit: {limit_bytes} bytes", flush=True)
    rows: list[dict[str, Cell]] = []
    for size in settings.sizes:
        rows += rows_of(size, settings, limit_bytes)
        all_rows = with_kept("dynamic", rows, ("batch_size", "variant")) if settings.keep else tuple(rows)
        notes = (*NOTES, f"{settings.steps} batches of each size")
        results = Results("dynamic", "Training on batches of varying lengths, under a limit", COLUMNS, all_rows, notes)
        if not settings.quick:
            results.save()
    results.print()


def _settings() -> Settings:
    parser = argparse.ArgumentParser(prog="bench.dynamic", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small batch size, few steps, nothing compiled by bucket")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2, help="how often all batches are stepped through for tokens a second")
    parser.add_argument("--share", type=float, default=0.6, help="the limit, as a share of eager's peak at the largest batch size")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--patience", type=float, default=600.0, help="seconds that a way may take for its first time through")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="WAY", help="some alone")
    parser.add_argument("--keep", action="store_true", help="keep the rows of the saved table that are not measured now")
    parser.add_argument("--limit-bytes", type=int, help="the limit, where it was found in an earlier run")
    asked = parser.parse_args()
    variants = tuple(each for each in asked.variants if not (asked.quick and each.startswith("torch.compile")))
    sizes, steps, rounds = ((4,), 3, 1) if asked.quick else (tuple(asked.sizes), asked.steps, asked.rounds)
    return Settings(sizes, steps, rounds, asked.share, asked.threads, asked.patience, variants, asked.quick, asked.keep, asked.limit_bytes)


def _limit_bytes(settings: Settings) -> int:
    """A share of eager's peak for the heaviest batch of the largest size."""
    task = Task(max(settings.sizes), settings.steps)
    worker = Worker(_EAGER, task, 0, settings.threads)
    peak = worker.peak_bytes(task.heaviest()) if worker.start(settings.patience_s) else None
    worker.close()
    if peak is None:
        raise RuntimeError(f"expected eager to train, got: {worker.failed}")
    return int(settings.share * peak)


def rows_of(size: int, settings: Settings, limit_bytes: int) -> list[dict[str, Cell]]:
    """One batch size: all ways alive at once, started one after another."""
    task = Task(size, settings.steps)
    names = [each for each in settings.variants if each != _SLOW_TO_COMPILE or size == max(settings.sizes)]
    workers = []
    try:
        for name in names:
            workers.append(Worker(name, task, limit_bytes, settings.threads))
            workers[-1].start(settings.patience_s)
            print(f"batch size {size}: {name}: {workers[-1].failed or workers[-1].started}", flush=True)
        _take_turns([each for each in workers if not each.failed], settings)
        return _against_eager([_row(worker, task, limit_bytes) for worker in workers])
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
                worker.seconds[-1].append(worker.step(index))


def _against_eager(rows: list[dict[str, Cell]]) -> list[dict[str, Cell]]:
    """With tokens a second over eager's, where eager is one of the ways."""
    own = next((row.get("tokens_per_s") for row in rows if row["variant"] == _EAGER), None)
    for row in rows:
        mine = row.get("tokens_per_s")
        row["against_eager"] = mine / own if isinstance(own, float) and isinstance(mine, float) else None
    return rows


def _row(worker: Worker, task: Task, limit_bytes: int) -> dict[str, Cell]:
    row: dict[str, Cell] = {"batch_size": task.batch_size, "variant": worker.name, "limit_bytes": limit_bytes}
    peak = worker.peak_bytes(task.heaviest())
    if worker.failed or worker.started is None or peak is None:
        return row | {"failed": worker.failed}
    seconds = sum(map(statistics.median, zip(*worker.seconds, strict=True)))  # of each batch the median of its rounds
    return row | {
        "tokens_per_s": task.tokens / seconds,
        "peak_bytes": peak,
        "within": "within" if peak <= limit_bytes else "over the limit",
        "compilations": worker.started.compilations,
        "first_step_s": worker.started.first_s,
        "first_pass_s": worker.started.all_s,
    }


if __name__ == "__main__":
    main()
