"""The sections of the results page about several processes."""

from __future__ import annotations

from collections.abc import Iterable

from bench.ranks_simulated import OVER
from bench.results import RESULTS
from bench.tables_parts import Row, rows_of, section


def several_processes() -> Iterable[str]:
    """What there are files of."""
    if (RESULTS / "ranks.json").exists():
        yield _trained_together()
    if (RESULTS / "ranks_simulated.json").exists():
        yield _simulated()


def _trained_together() -> str:
    lines = [
        [
            f"{row['model']}, {row['ranks']}",
            row["how"],
            _figure(row.get("promised_mib"), 1),
            f"{row['measured_mib']:.1f}",
            _figure(row.get("bound_mib"), 1),
            f"{row['step_ms']:.0f}",
            f"{row['time_to_ddp']:.2f}",
            f"{row['time_to_fsdp2']:.2f}",
            _equal(row),
        ]
        for row in rows_of("ranks")
    ]
    return section(
        "Several processes",
        "ranks",
        "python -m bench.ranks",
        "Processes over gloo on one machine, a thread each. Peaks of a rank in MiB, weights, gradients and optimizer state included,\n"
        "promised and measured (median of five), beside DistributedDataParallel's less what is in shards. Milliseconds a step, two\n"
        "micro-batches, median of steps in turns; over DistributedDataParallel's time, clipped where the row is, and over FSDP2's.\n"
        "Equal: losses of 20 steps and weights after them to DistributedDataParallel's, to the last bit, or the largest difference of a\n"
        "loss, over the loss. More processes than cores wait for one another: times of four on two cores say little.\n"
        "What shards cost is traffic. For each element DistributedDataParallel's sum sends two, over two ranks. ZeRO 1 gathers one more;\n"
        "so does ZeRO 2 where gradients are clipped, as their norm is of the whole; unclipped it exchanges one and gathers one. ZeRO 3\n"
        'gathers one in every pass, but for what it has room to keep: "to the bound" it may take DistributedDataParallel\'s less shards.\n'
        "All ways of a model run in one process, whose C library gives pages back between their turns: a way in an arena keeps its own.\n"
        "DistributedDataParallel's own peak is 13 MiB more where a thread of gloo's still held a bucket while it was read: the bounds of\n"
        "such rows are as much too high.",
        ("model, ranks", "way", "promised", "measured", "DDP less shards", "ms", "over DDP", "over FSDP2", "equal"),
        lines,
    )


def _equal(row: Row) -> str:
    if row.get("losses_equal") is None:
        return ""
    both = row["losses_equal"] == row["weights_equal"] == "True"
    return "yes" if both else f"{row['largest_difference']:.0e}"


def _figure(value: float | None, places: int) -> str:
    return "" if value is None else f"{value:.{places}f}"


def _simulated() -> str:
    over = [f"within_{round(100 * each)}_gib" for each in OVER[1:]]
    lines = [
        [
            f"{row['model']}, {row['layers']} layers, {row['shard']}",
            *(f"{row[name]:.2f}" for name in ("held_gib", "eager_gib", "order_gib", *over, "least_gib")),
            f"{row['least_time_ratio']:.2f}",
            f"{row['step_ms']:.0f}, {row['links_ms']:.0f}",
            f"{row['planning_s']:.0f}",
        ]
        for row in rows_of("ranks_simulated")
    ]
    return section(
        "Eight H200, simulated",
        "ranks_simulated",
        "python -m bench.ranks_simulated",
        "The least memory of a rank, and what time buys: peaks in GiB of one of eight ranks, by what is in shards. Nothing ran: operators\n"
        "by the roofline, collectives by links of 450 GB/s each way, one after the other with what they would run beside, which is an\n"
        "upper bound. bfloat16, AdamW, one text of 2,048 tokens a rank, quick effort. Of Llama 7B (32 layers, 13,000 operators, two\n"
        "to nine minutes a row) eight layers are planned without shards and with ZeRO 1. GPT-Neo's first three rows are of an earlier\n"
        "search, which did not begin where gradients leave at once: their least may be too much. With parameters in shards a search\n"
        "weighs what is gathered again against what is computed again.",
        ("", "between steps", "as written", "order alone", *(f"+{each:.0%} time" for each in OVER[1:]), "least", "its time", "ms, on links",
         "planning, s"),
        lines,
    )  # fmt: skip
