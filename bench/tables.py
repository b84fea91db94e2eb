"""Writes docs/results.md from the tables in `bench/results`: no figure on that page is typed by hand.

    python -m bench.tables

A ratio of times has three readings: the median of the paired wall-clock ratios, the same of processor time, and the ratio of the two
medians. Where they are further apart than `APART`, the page has no figure.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from bench.tables_edge import small_devices
from bench.tables_fission import in_parts
from bench.tables_frameworks import where_people_train
from bench.tables_gpu import on_a_gpu
from bench.tables_inference import inference
from bench.tables_operators import of_others
from bench.tables_parts import APART, NO_FIGURE, Row, ages, agreed, mib, percent, ratio, rows_of, section
from bench.tables_ranges import varying_lengths
from bench.tables_ranks import several_processes
from lowtide.planning.request import Effort
from lowtide.remat.sweep import Sweep

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
_WAITS = ("not_searched", "nothing_known", "other_limit", "all_known", "explain")  # of `bench.planning_time`


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page as it should be."""
    parts = (
        _head(),
        _order_alone(),
        _proven(),
        _long_orders(),
        _equal(),
        _limits(),
        _swapping(),
        *in_parts(),
        _algebra(),
        _arena(),
        _step_time(),
        _waiting(),
        _stability(),
        _report(),
        _addresses(),
        _model_paper(),
        *varying_lengths(),
        *where_people_train(),
        *several_processes(),
        *of_others(),
        *inference(),
        *small_devices(),
        *on_a_gpu(),
        ages(),
    )
    return "\n\n".join(parts) + "\n"


def _head() -> str:
    return (
        "# Results\n\n"
        "This page is written by `python -m bench.tables` from the files in `bench/results`. Each section names the command that\n"
        "measured it, the machine, the versions, and the commit of the package that was measured. Where that is an earlier one and\n"
        "what is measured has changed since, the section says so: its figures are not those of the present code. MiB is 2^20 bytes.\n"
        "Times were taken on machines that ran other work, too. A ratio of times has three readings: the median of paired wall-clock\n"
        "ratios, the same of processor time, and the ratio of the medians.\n"
        f'Where they are more than {APART} apart, the table says "{NO_FIGURE}".'
    )


def _order_alone() -> str:
    rows = [row for row in rows_of("order_only") if row["how"] == "run"]
    many = {row["model"]: row for row in rows if row["batch_size"] == 32}
    lines = [
        [
            row["model"],
            mib(row["eager_measured_bytes"]),
            mib(row["measured_bytes"]),
            f"{row['measured_saving']:.1%}",
            f"{row['promise_error']:+.2%}",
            f"{many[row['model']]['measured_saving']:.1%}" if row["model"] in many else "",
        ]
        for row in rows
        if row["batch_size"] == 1
    ]
    return section(
        "Order alone",
        "order_only",
        "python -m bench.order_only",
        "Whole training steps with plain SGD. Peaks are what the allocator measured, with parameters and batch. Nothing is\n"
        "computed twice. "
        "Order saves most where gradients outweigh activations, and little at large batches.",
        ("batch 1", "eager, MiB", "lowtide, MiB", "less", "promise off by", "less at batch 32"),
        lines,
    )


def _proven() -> str:
    rows = rows_of("order_real")
    proven = sum(row["status"] == "optimal" for row in rows)
    operators = [row["operators"] for row in rows]
    return section(
        "Orders that are proven",
        "order_real",
        "python -m bench.order_real",
        f"{proven} of {len(rows)} training steps, of {min(operators):,} to {max(operators):,} operators, end with the proof"
        f" that no order needs less.\nThe slowest takes {max(row['cpu_s'] for row in rows):.2f} s of processor time.",
    )


def _long_orders() -> str:
    lines = [
        [
            row["step"],
            f"{row['operators']:,}",
            f"{row['seconds']:.1f}",
            f"{row['process_bytes'] / 2**30:.1f}",
            "proven" if row["status"] == "optimal" else f"{row['gap_percent']:.4f} %",
        ]
        for row in rows_of("large")
        if row["operators"] > 50_000
    ]
    return section(
        "Orders of long steps",
        "large",
        "python -m bench.large",
        "Made-up training steps, and random layers of 16 nodes. Seconds are the processor's, GiB those of the whole process. The gap is\n"
        "to a bound that no order's peak is below.",
        ("", "operators", "seconds", "GiB", "gap"),
        lines,
    )


def _equal() -> str:
    said = []
    for name, how in (("equal", "without a limit"), ("equal_limited", "under a limit of time (1.5 times) and in an arena")):
        rows = [row for row in rows_of(name) if row["tensors"] is not None]
        tensors, different = sum(row["tensors"] for row in rows), sum(row["different"] for row in rows)
        said.append(f"- {how}: {len(rows)} networks, {tensors:,} tensors, {different} different (`{name}.json`).")
    text = (
        "Three steps of eager PyTorch and of lowtide, with six optimizers in turn. Parameters, buffers, state and losses\nare compared.\n\n"
    )
    return section("Equal to the last bit", "equal", "python -m bench.equal", text + "\n".join(said))


def _limits() -> str:
    rows = rows_of("budget")
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of = {row["setting"]: row for row in rows if row["model"] == model}
        lowest = min(row["peak_bytes"] for row in rows if row["model"] == model and row["setting"] == "lowtide")
        lines.append(
            [
                f"{model}, batch {of['eager']['batch_size']}",
                mib(of["eager"]["peak_bytes"]),
                mib(of["checkpoint"]["peak_bytes"]),
                ratio(of["checkpoint"], of["eager"], "eager"),
                ratio(of["lowtide at checkpoint"], of["checkpoint"], "peer"),
                ratio(of["lowtide arena at checkpoint"], of["checkpoint"], "peer"),
                mib(lowest),
            ]
        )
    limited = [row for row in rows if row.get("limit_bytes")]
    kept = sum(row["kept"] == "yes" for row in limited)
    off = max(abs(row["promise_off"]) for row in limited if row["promise_off"] is not None)
    exact = f" to within {off:.3%}" if off else ", to the byte"
    return section(
        "Under a limit",
        "budget",
        "python -m bench.budget",
        "Whole SGD steps. Each setting is a process of its own, and those that are compared take turns. Bytes are above\n"
        "parameters and batch.\n"
        "Checkpointing is one `torch.utils.checkpoint` for each block. lowtide was given as many bytes as that took.\n"
        f"{_searched()}\n"
        f"Of {len(limited)} limits, {kept} were kept. The promised peak was the measured one{exact}.\n"
        "All settings, torch.compile's `activation_memory_budget` with them, are in the file and in `budget.png`.\n"
        "`budget_inductor.json` has inductor.",
        (
            "",
            "eager, MiB",
            "checkpointing, MiB",
            "its time over eager's",
            "lowtide's time over checkpointing's",
            "in an arena",
            "least, MiB",
        ),
        lines,
    )


def _swapping() -> str:
    names = [row["network"] for row in rows_of("magis") if row["moves"] == "swap" and "," not in row["network"]]
    found = {(row["network"], row["moves"]): row for row in rows_of("magis")}
    lines = [
        [network, *(_with_proof(found.get((network, moves), {}), share) for moves in ("recompute", "swap", "split") for share in (80, 40))]
        for network in names
    ]
    return section(
        "Recomputation and swapping, simulated",
        "magis",
        "python -m bench.magis",
        "MAGIS's workloads as their authors describe the networks: whole steps on the roofline of an RTX 3090. Shares are of\n"
        "eager's peak, parameters included. The table is the time that a limit adds to the least without one, and in brackets what no\n"
        "sequence of any graph that was tried adds less than, proven within the peak of that plan.\n"
        f"{_searched()}",
        ("", "recomputation, 80 %", "40 %", "with swapping, 80 %", "40 %", "in parts and rewritten, too, 80 %", "40 %"),
        lines,
    )


def _with_proof(row: Row, share: int) -> str:
    proven = row.get(f"proven_at_{share}")
    return percent(row.get(f"overhead_at_{share}")) + ("" if proven is None else f" ({percent(proven)})")


def _algebra() -> str:
    rows = rows_of("algebra")
    lines = [
        [
            f"{row['model']}, batch {row['batch']}",
            row["limit"],
            *(mib(row[f"{name}_peak_bytes"] - row["resident_bytes"]) for name in ("eager", "without", "with", "measured")),
            f"{row['with_us'] / row['without_us']:.3f}" if row["with_us"] is not None else "",
            f"{row['with_to_without']:.2f}",
            f"{row['without_plan_seconds']:.1f}, {row['with_plan_seconds']:.1f}",
        ]
        for row in rows
    ]
    different = sum(row["equal"] != "yes" for row in rows)
    return section(
        "Operators that hold less",
        "algebra",
        "python -m bench.algebra",
        "Masks as bits, indices as places in their windows, gradients let through before they are spread: steps planned with these rules\n"
        f"and without. Of {len(rows)} rows, {different} left other bits than eager's. MiB are above parameters and batch. The limit is\n"
        "60 % of what eager takes so; without one, rules may cost no time. Ratios are of predicted times, and of processor time that was\n"
        "measured (medians of 9 steps in turns, GPT-2's of 3): of a plan and itself, as SqueezeNet's within 60 %, that differs by some\n"
        "percent.",
        (
            "",
            "limit",
            "eager, MiB",
            "without",
            "with",
            "measured",
            "predicted time, with over without",
            "measured time",
            "seconds to plan, without and with",
        ),
        lines,
    )


def _searched() -> str:
    """With which effort, and what the default is."""
    default = Effort.NORMAL.sweeps[-1].max_states
    return f"The search is `Sweep()`, of {Sweep().max_states:,} schedules; the default effort looks at {default:,} at most."


def _arena() -> str:
    rows = rows_of("arena")
    lines = [
        [
            f"{row['model']}, batch {row['batch_size']}",
            agreed(row, "arena_ms"),
            f"{row['served_share']:.2%}",
            f"{row['growth_over_planned'] - 1:+.1%}",
        ]
        for row in rows
    ]
    return section(
        "In an arena",
        "arena",
        "python -m bench.arena",
        "All that a step allocates on the CPU lies at planned addresses in one block.",
        ("", "time of a step over eager's", "bytes served", "resident set over the plan"),
        lines,
    )


def _step_time() -> str:
    lines = [
        [
            f"{row['model']}, batch {row['batch_size']}",
            f"{row['wall_ratio']:.2f}",
            f"{row['least_wall_ratio']:.2f} to {row['most_wall_ratio']:.2f}",
            f"{row['lowtide_ms'] / row['eager_ms']:.2f}",
            f"{row['cpu_ratio']:.2f}",
        ]
        for row in rows_of("step_time")
    ]
    return section(
        "Step time by order alone",
        "step_time",
        "python -m bench.step_time",
        "Time of a step over eager's. Each training is a process of its own, in turns; all readings are given, since they scatter.",
        ("", "median of pairs", "least and most", "ratio of medians", "processor time"),
        lines,
    )


def _waiting() -> str:
    lines = [
        [
            row["network"],
            f"{row['operators']:,}",
            *(f"{row[f'{name}_s']:.1f}" for name in _WAITS),
            f"{row['normal_60']:.1f}%, {row['thorough_60']:.1f}%" if row["normal_60"] is not None else "",
        ]
        for row in rows_of("planning_time")
    ]
    return section(
        "Waiting",
        "planning_time",
        "python -m bench.planning_time",
        'Seconds of wall clock from the model to the step with `memory="60%"`, kernels compiled: with all operators known, with none,\n'
        "for another limit by `step.at`, in another process that asks the same, and for `lowtide.explain`. Last, the time that 60 %\n"
        "adds, by the default effort and by the thorough one.",
        ("", "operators", "step", "operators unknown", "other limit", "asked again", "explain", "60 % adds"),
        lines,
    )


def _stability() -> str:
    lines = [
        [
            row["network"],
            f"{row['limit_percent']} %",
            *(f"{row[f'{which}_percent']:.1f}%" for which in ("normal", "least", "most", "thorough")),
            f"{row['search_cpu_s']:.1f}",
        ]
        for row in rows_of("stability")
        if row["normal_percent"] is not None
    ]
    return section(
        "Other days' times",
        "stability",
        "python -m bench.stability",
        "Measured times vary from day to day, and answers with them: all times are varied by 3 %, again and again. The time that a limit\n"
        "adds, by the default effort with the times as they are, the least and the most where they vary, and by the thorough effort with\n"
        "the times as they are. Limits are shares of the peak of the orders, for a simulated H100. Last, processor seconds of a search.",
        ("", "limit", "default", "least", "most", "thorough", "seconds"),
        lines,
    )


def _report() -> str:
    lines = [
        [f"{row['operators']:,}", mib(row["page_bytes"]), f"{row['write_s']:.2f}", f"{row['open_ms']:.0f}"] for row in rows_of("report")
    ]
    return section(
        "The page of a plan",
        "report",
        "python -m bench.report",
        "What `step.report` writes, of made-up steps under a limit, and how long Chromium takes to open it, its script included.",
        ("operators", "MiB", "seconds to write", "milliseconds to open"),
        lines,
    )


def _addresses() -> str:
    rows = [row for row in rows_of("place") if row["solver"] == "auto"]
    fits = [row for row in rows if row["minimalloc_cpu_s"] is not None]
    lines = [[row["instance"], f"{row['buffers']:,}", f"{row['cpu_s']:.2f}", f"{row['minimalloc_cpu_s']:.2f}"] for row in fits]
    others = [row for row in rows if row["question"] == "smallest" and row["buffers"] > 500]
    said = [
        f"- {row['instance']}, {row['buffers']:,} buffers: {row['cpu_s']:.2f} s, "
        + ("at the proven bound" if not row["above_percent"] else f"{row['above_percent']:.2f} % above the proven bound")
        for row in others
    ]
    models = rows_of("place_models")
    exact = [row for row in models if row["alignment"] == 1]
    slowest_s = max(row["cpu_s"] for row in exact)
    at_bound = sum(row["above"] == 0 for row in exact)
    said.append(f"- {len(exact)} training steps: {at_bound} at the bound, in at most {slowest_s:.2f} s (`place_models.json`)")
    return section(
        "Addresses",
        "place",
        "python -m bench.place",
        "Minimalloc's instances within 1 MiB, processor seconds.",
        ("", "buffers", "lowtide", "minimalloc"),
        lines,
        after="The smallest arena of larger ones:\n\n" + "\n".join(said),
    )


def _model_paper() -> str:
    table = rows_of("model_paper")
    rows = [row for row in table if row["network"] not in ("mean", "MODeL")]
    lines = []
    for inputs, what in (("paper", "MODeL's inputs"), ("list", "larger inputs")):
        for batch_size in (1, 32):
            of = {row["network"]: row for row in table if row["inputs"] == inputs and row["batch_size"] == batch_size}
            figures = (of["mean"]["saving"], of["mean"]["saving_1_11"], of["MODeL"]["saving"])
            lines.append([f"{what}, batch {batch_size}", *(f"{figure:.1%}" for figure in figures)])
    seconds = [row["planning_s"] for row in rows]
    return section(
        "Against PyTorch's CUDA allocator",
        "model_paper",
        "python -m bench.model_paper",
        "MODeL's experiments: order and addresses together, against the caching allocator with its fragmentation, simulated rule by rule.\n"
        "MODeL was measured on PyTorch 1.11, whose loop keeps its gradients. Its own figures are from the paper.\n"
        f"Planning takes {statistics.median(seconds):.2f} s in the median, {max(seconds):.1f} s at worst.",
        ("mean of eleven networks", "less than PyTorch", "less than PyTorch 1.11", "MODeL"),
        lines,
    )


if __name__ == "__main__":
    main()
