"""Time against the host's memory: large models trained within 24 GiB of a simulated H100, by what may be pinned on the host.

    python -m bench.host_bytes [--models gpt-neo-1.3B llama-7B] [--layers 32] [--effort quick] [--no-save]

Nothing runs: the model is on the meta device, no GPU is needed, and times are by the roofline of the machine. One search answers all limits
of both memories, and the rows are checked to be monotone in both: more of either is never slower.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

import torch
from torch import nn

import lowtide
from bench.ranks_simulated import MODELS, loss_of
from bench.results import Results, with_kept
from lowtide.base.messages import bytes_text
from lowtide.cost.presets import preset
from lowtide.errors import BudgetError
from lowtide.ir.graph import Kind

MACHINE, TEXTS, LENGTH, GIB = "h100", 8, 2048, 2**30
HOST_GIB = (0, 8, 16, 32, 48, 64, None)  # None: without a limit


class Case(NamedTuple):
    """A model and how it is trained, 8 texts in a batch."""

    model: str
    optimizer: str
    state: str = "device"
    device_gib: tuple[int, ...] = (20, 24, 32)


BETWEEN = "between steps"
CASES = {
    "gpt-neo-1.3B": Case("gpt-neo-1.3B", "AdamW"),
    "llama-7B": Case("llama-7B", "SGD"),  # whose state 24 GiB have room for
    f"gpt-neo-1.3B, {BETWEEN}": Case("gpt-neo-1.3B", "AdamW", "host", (6, 8, 12)),
    f"llama-7B, {BETWEEN}": Case("llama-7B", "AdamW", "host", (23, 24, 32)),
}
COLUMNS = (
    "model", "effort", "layers", "texts", "optimizer", "device_gib", "host_gib", "peak_gib", "pinned_gib", "time_ms", "slower_percent",
    "bound_percent", "state_ms", "recomputed", "swapped", "operators", "eager_gib", "planning_cpu_s",
)  # fmt: skip
NOTES = (
    "bfloat16, texts of 2,048 tokens; peaks with weights and optimizer state; host_gib: the limit, 0 for a byte, - for none",
    "pinned_gib: all buffers on the host, which are powers of two; slower_percent: over the same without any limit; bound_percent: as much "
    "is proven to be needed within that peak, whatever is pinned",
    'between steps: with Run(state="host"), where the state of the optimizer lies on the host then; state_ms: what it takes a link one way',
    "planning_cpu_s: processor time, beside other work, until all limits can be answered",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--layers", type=int, help="of each model, in place of its own number")
    parser.add_argument("--texts", type=int, help="in a batch, in place of the case's own number")
    parser.add_argument("--effort", default="quick", choices=["quick", "normal", "thorough"])
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    for name in options.models:
        rows = rows_of(name, options.layers, options.texts, options.effort)
        check_monotone(rows)
        results = Results("host_bytes", "Time by the host's memory", COLUMNS, with_kept("host_bytes", rows, ("model", "effort")), NOTES)
        results.print()
        if not options.no_save:
            results.save()


def rows_of(name: str, layers: int | None, texts: int | None, effort: str) -> list[dict[str, Any]]:
    """One model within all limits."""
    case = CASES[name]
    make, own = MODELS[case.model]
    with torch.device("meta"):
        model = make(layers or own).to(torch.bfloat16).train()
        tokens = torch.zeros(texts or TEXTS, LENGTH, dtype=torch.long)
    begun = time.process_time()
    step = lowtide.optimize(
        model,
        {"input_ids": tokens},
        loss=loss_of,
        optimizer=_optimizer(model, case.optimizer),
        latency=1.0,
        run=lowtide.Run(state=case.state),
        planning=lowtide.Planning(device="cuda", simulate=MACHINE, effort=effort, progress=False),
    )
    took_s = time.process_time() - begun
    rows = []
    for device_gib in case.device_gib:
        for host_gib in HOST_GIB:
            planned = _within(step, device_gib, host_gib)
            shared = {
                "model": name,
                "effort": effort,
                "layers": layers or own,
                "texts": len(tokens),
                "optimizer": case.optimizer,
                "planning_cpu_s": took_s,
            }
            rows.append(shared | {"device_gib": device_gib, "host_gib": host_gib} | planned)
            print(rows[-1], flush=True)
    return rows


def _within(step: lowtide.Step, device_gib: int, host_gib: int | None) -> dict[str, Any]:
    limits: dict[str, int | str] = {"cuda": device_gib * GIB} | ({} if host_gib is None else {"host": max(1, host_gib * GIB)})
    try:
        plan = step.at(memory=limits).plan
    except BudgetError as error:
        least = error.smallest_host_bytes
        print(f"{device_gib} GiB: {'the device' if least is None else f'the host, {bytes_text(least)} would do'}; {error}")
        return {}
    report = plan.cost_report
    assert report is not None, "a limit was asked for"
    return {
        "peak_gib": plan.peak_bytes / GIB,
        "pinned_gib": plan.pinned_bytes / GIB,
        "time_ms": report.time_us / 1e3,
        "slower_percent": 100 * (report.time_us / report.order_us - 1),
        "bound_percent": 100 * (report.time_bound_us / report.order_us - 1) if report.time_bound_us else None,
        "state_ms": sum(preset(MACHINE).load_us(value.storage.nbytes) for value in plan.graph.inputs if value.storage.kind is Kind.HOST)
        / 1e3,
        "recomputed": report.recomputed,
        "swapped": sum(1 for each in report.evictions if each.load_us),
        "operators": len(plan.graph.nodes),
        "eager_gib": plan.eager_peak_bytes / GIB,
    }


def check_monotone(rows: list[dict[str, Any]]) -> None:
    """Raises ValueError where more of one memory, and no less of the other, is slower."""
    for one in rows:
        for other in rows:
            more = other["device_gib"] >= one["device_gib"] and _room(other) >= _room(one)
            if more and "time_ms" in one and other.get("time_ms", float("inf")) > one["time_ms"] * (1 + 1e-9):
                raise ValueError(f"expected no more time than {one}, got {other}")


def _room(row: dict[str, Any]) -> float:
    return float("inf") if row["host_gib"] is None else row["host_gib"]


def _optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    return torch.optim.AdamW(model.parameters(), foreach=False)


if __name__ == "__main__":
    main()
