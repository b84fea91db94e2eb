"""What algebra's rules buy on real programs: the peak with and without them, promised and measured, and the time.

    python -m bench.algebra [NAME ...] [--repeats 3]

Each program is planned without a limit, where a rule may cost no time, and within 60 % of eager's peak above the caller's own, each time
with the rules and without. A step of either trains as eager does from the same weights and random state, bit for bit, or the row says so.
Times are processor time of one thread, steps in turns, as ratios to eager's of the same round.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import lowtide
from bench import models
from bench.models.language import hugging_face
from bench.models.workload import Entry, Workload, keyword_loss, labels, plain_sgd
from bench.results import Cell, Results, with_kept
from lowtide.planning import machine

SHARE = 0.6
COLUMNS = (
    "model", "batch", "limit", "eager_peak_bytes", "resident_bytes", "without_peak_bytes", "with_peak_bytes", "measured_peak_bytes",
    "without_us", "with_us", "without_to_eager", "with_to_eager", "with_to_without", "equal", "without_plan_seconds", "with_plan_seconds",
    "rules",
)  # fmt: skip


def _tokens(vocabulary: int, length: int, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return labels(vocabulary, batch_size, length), labels(vocabulary, batch_size, length)


_T5 = Entry(
    "t5-small",
    partial(hugging_face, "T5ForConditionalGeneration", "T5Config", decoder_start_token_id=0),
    partial(_tokens, 32_128, 128),
    keyword_loss("input_ids", "labels", use_cache=False),
    "transformers.T5ForConditionalGeneration, 128 + 128 tokens",
)
WORKLOADS: dict[str, tuple[Entry, int]] = {
    "squeezenet1_0": (models.get("squeezenet1_0"), 4),
    "t5-small": (_T5, 2),
    "resnet18": (models.get("resnet18"), 4),
    "vgg16": (models.get("vgg16"), 4),
    "resnet50": (models.get("resnet50"), 4),
    "bert-base": (models.get("bert-base"), 4),
    "gpt2": (models.get("gpt2"), 2),
}


@dataclass(frozen=True)
class Trained:
    """A model, what trains it by a step, and what that step promises."""

    model: nn.Module
    call: Callable[[], Any]
    step: lowtide.Step | None = None
    seconds: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    rows: list[dict[str, Cell]] = []
    for name in given.names:
        memory = None
        for limit in ("none", f"{SHARE:.0%}"):
            rows.append({"limit": limit} | row(name, memory, given.repeats))
            print(rows[-1], flush=True)
            memory = _memory(rows[-1])
            gc.collect()
            _table(rows).save()
    _table(rows).print()


def _table(rows: list[dict[str, Cell]]) -> Results:
    notes = ("with_to_eager and the like: medians of the ratios of processor time, step by step in turns",)
    return Results("algebra", "What algebra's rules buy", COLUMNS, with_kept("algebra", rows, ("model", "limit")), notes)


def row(name: str, memory: int | None, repeats: int) -> dict[str, Cell]:
    """One program, within so many bytes where that is said."""
    entry, batch_size = WORKLOADS[name]
    work = entry.build(batch_size)
    plan = partial(_planned, work, memory)
    with _no_rules():
        without = plan()
    ruled = plan()
    eager = _eager(work)
    equal = all(_equal(eager, each) for each in (without, ruled))
    times = _times({"eager": eager.call, "without": without.call, "with": ruled.call}, repeats)
    assert without.step is not None
    assert ruled.step is not None
    measured = ruled.step.measure(*work.batch).peak_bytes
    before, after = without.step.plan, ruled.step.plan
    return {
        "model": name, "batch": batch_size,
        "eager_peak_bytes": before.eager_peak_bytes, "resident_bytes": before.resident_bytes,
        "without_peak_bytes": before.peak_bytes, "with_peak_bytes": after.peak_bytes, "measured_peak_bytes": measured,
        "without_us": _promised_us(before), "with_us": _promised_us(after),
        "without_to_eager": _ratio(times, "without", "eager"), "with_to_eager": _ratio(times, "with", "eager"),
        "with_to_without": _ratio(times, "with", "without"), "equal": "yes" if equal else "no",
        "without_plan_seconds": without.seconds, "with_plan_seconds": ruled.seconds,
        "rules": "; ".join(f"{each.rule}: {len(each.storages)}, {each.held_bytes} B, {each.cost_us:.0f} us" for each in after.algebra),
    }  # fmt: skip


def _memory(unlimited: Mapping[str, Any]) -> int:
    """The share of what eager takes above what the caller holds, with that."""
    held, peak = unlimited["resident_bytes"], unlimited["eager_peak_bytes"]
    return int(held + SHARE * (peak - held))


def _planned(work: Workload, memory: int | None) -> Trained:
    model = copy.deepcopy(work.model)
    begin = time.perf_counter()
    step = lowtide.optimize(
        model, work.batch, loss=work.loss, optimizer=plain_sgd(model), memory=memory, planning=lowtide.Planning(progress=False)
    )
    seconds = sum(step.seconds.get(stage, 0.0) for stage in ("capture", "order"))
    print(f"planned in {time.perf_counter() - begin:.1f} s, {step.seconds}", flush=True)
    return Trained(model, lambda: step(*work.batch), step, seconds)


def _eager(work: Workload) -> Trained:
    model = copy.deepcopy(work.model)
    optimizer = plain_sgd(model)

    def call() -> torch.Tensor:
        optimizer.zero_grad()
        loss = work.loss(model, *work.batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Trained(model, call)


def _equal(eager: Trained, other: Trained) -> bool:
    """Whether a step more leaves the same bits: both have done as many."""
    found = []
    for each in (eager, other):
        model_before = copy.deepcopy(each.model.state_dict())
        torch.manual_seed(7)
        value = each.call()
        found.append((value, {name: tensor.clone() for name, tensor in each.model.state_dict().items()}))
        each.model.load_state_dict(model_before)
    (one, here), (two, there) = found
    return torch.equal(one, two) and all(torch.equal(here[name], there[name]) for name in here)


def _times(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Processor time of each call, in turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats):
        for name in reversed(calls) if turn % 2 else calls:
            gc.collect()
            begin = time.process_time()
            calls[name]()
            found[name].append(time.process_time() - begin)
    return found


def _ratio(times: dict[str, list[float]], one: str, other: str) -> float:
    return statistics.median(mine / theirs for mine, theirs in zip(times[one], times[other], strict=True))


def _promised_us(plan: lowtide.Plan) -> float | None:
    return None if plan.cost_report is None else plan.cost_report.time_us


@contextmanager
def _no_rules() -> Iterator[None]:
    """Plan without algebra."""
    before: Any = machine.rewritings
    machine.rewritings = lambda *given, **more: iter(())
    try:
        yield
    finally:
        machine.rewritings = before


if __name__ == "__main__":
    main()
