"""The paper's own widths, planned for an A100 of 40 GiB: Llama-2 7B with 4 layers, one step for all lengths, on the meta device.

    python -m bench.dynamic.planned [--sizes 20 30 40] [--lengths 128 375 750]

Nothing is run: times are by the roofline of the preset `a100`, sizes as its allocator rounds them, both for lowtide's plan and for what
the paper's method would run (`research.eviction`, in the better of two orders, reloading allowed as in the paper). Lengths are in
tokens, one for four of CodeAlpaca-20K's characters. The paper does not say which batch sizes it took: these are such that only the
smallest fits as it stands, which is what its table shows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bench.dynamic.paper import InBothOrders
from bench.dynamic.task import LLAMA_2_7B, adamw, loss, model
from bench.in_values import in_values
from bench.results import Cell, Results, with_kept
from lowtide.cost.presets import preset
from lowtide.errors import BudgetError
from lowtide.ir.graph import Graph
from lowtide.ir.shapes.points import at

LIMIT_BYTES = 40 * 2**30
DEVICE = "a100"
COLUMNS = (
    "batch_size", "length", "limit_bytes", "eager_peak_bytes", "eager_us",
    "lowtide_peak_bytes", "lowtide_us", "paper_peak_bytes", "paper_held_bytes", "paper_us", "paper_evictions", "failed",
)  # fmt: skip
NOTES = (
    "Llama-2 7B widths, 4 layers, float32 with TF32 products, AdamW; planned on the meta device, times by roofline: nothing was run",
    "lowtide: one step for all lengths of a batch size, captured and planned once",
    "paper_peak_bytes: what it ran, counted as all sequences are; paper_held_bytes: with tensors held until they are evicted",
    "paper: research.eviction, with reloading over the same links as lowtide's swapping; in the paper's order or in the program's"
    " own, whichever ends sooner within the limit",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.dynamic.planned", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[20, 30, 40])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 375, 750])
    parser.add_argument("--keep", action="store_true", help="keep the rows of the saved table that are not planned now")
    asked = parser.parse_args()
    rows: list[dict[str, Cell]] = []
    for size in asked.sizes:
        for row in rows_of(size, asked.lengths):
            rows.append(row)
            print(row, flush=True)
        all_rows = with_kept("dynamic_planned", rows, ("batch_size", "length")) if asked.keep else tuple(rows)
        results = Results("dynamic_planned", "Planned for an A100 at points of the range", COLUMNS, all_rows, NOTES)
        results.save()
    results.print()


def rows_of(size: int, lengths: Sequence[int]) -> Iterator[dict[str, Cell]]:
    """One batch size: one step for all lengths, asked at some."""
    step = _ranged(size, lengths)
    captured = step._maker._served[0].region.captured[-1].graph
    for length in lengths:
        try:
            plan = step.plan_for(**_batch(size, length))
            found: dict[str, Cell] = {"eager_peak_bytes": plan.eager_peak_bytes, "lowtide_peak_bytes": plan.peak_bytes}
            found["lowtide_us"] = plan.cost_report.time_us if plan.cost_report is not None else None
        except BudgetError as error:
            found = {"failed": str(error)[:200]}
        at_point = {"batch_size": size, "length": length, "limit_bytes": LIMIT_BYTES}
        yield at_point | _of_paper(at(captured, {"length": length})) | found


def _ranged(size: int, lengths: Sequence[int]) -> Any:
    from lowtide import optimize

    with torch.device("meta"):
        made = model(LLAMA_2_7B)
    dynamic = {"input_ids": {1: ("length", min(lengths), max(lengths))}, "labels": {1: "length"}}
    settings: dict[str, Any] = {"simulate": DEVICE, "memory": LIMIT_BYTES, "dynamic": dynamic, "progress": False}
    return optimize(made, _batch(size, max(lengths)), loss=loss, optimizer=adamw(made), **in_values(**settings))


def _batch(size: int, length: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(size, length, dtype=torch.int64, device="meta")
    return {"input_ids": tokens, "labels": tokens.clone()}


def _of_paper(graph: Graph) -> dict[str, Cell]:
    """What the paper's method would run of the same program, and what the program takes as it stands."""
    device = preset(DEVICE)
    node_us, nothing = device.graph_us(graph), (0,) * len(graph.nodes)
    done = InBothOrders.of(graph).executed({}, node_us, nothing, LIMIT_BYTES, round_to=device.granule_bytes, swap=device)
    return {
        "eager_us": sum(node_us),
        "paper_peak_bytes": done.peak_bytes,
        "paper_held_bytes": done.held_bytes,
        "paper_us": done.time_us,
        "paper_evictions": done.evictions,
    } | ({} if done.misfit is None else {"failed": f"paper: {done.misfit}"})


if __name__ == "__main__":
    main()
