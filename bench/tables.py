"""Writes docs/results.md from the tables in `bench/results`: no figure on that page is typed by hand.

    python -m bench.tables

A ratio of times has three readings: the median of the paired wall-clock ratios, the same of processor time, and the ratio of the two
medians. Where they are further apart than `APART`, the page has no figure.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.results import RESULTS
from lowtide.planning.effort import Effort
from lowtide.remat.sweep.search import Sweep

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
APART = 0.03
NO_FIGURE = "readings disagree"
Row = Mapping[str, Any]
_WAITS = ("not_searched", "nothing_known", "other_limit", "all_known", "explain")  # of `bench.planning_time`
# Files that were saved before files held a commit: the last that had changed the package by then, and what is not as it was.
_EARLIER = {
    "order_only": ("47d4c6c", "an order is searched for with less effort, and capture has changed"),
    "budget": ("cffd48a", "the search has changed, and no clock ends it any more, as 60 seconds did"),
    "magis": ("cffd48a", "the search has changed"),
    "arena": ("46d3dcd", "how a step begins and ends in its arena has changed"),
    "place": ("67ebfdd", "the placers' code has changed"),
    "model_paper": ("9e880e3", "orders are searched for with less effort, and capture and placers have changed"),
}

# What is not as it was when a file that holds its commit was saved, as far as it bears on its figures.
_SINCE = {
    "order_real": "capture has changed",
    "equal": "capture and planning have changed",
    "equal_limited": "capture and planning have changed",
    "step_time": "rules of algebra are tried without a limit, too; other work ran beside some of the pairs",
    "planning_time": "operators are tried while the program is captured, and graphs rewritten by algebra are planned, too",
    "dynamic_planned": "the members of a range have changed",
    "dynamic_equal": "nothing has changed for U-Net and BERT; the rows of GPT-2 and Llama are of commit 587350c, and members have changed",
}


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page as it should be."""
    parts = (
        _head(),
        _order_alone(),
        _proven(),
        _equal(),
        _limits(),
        _swapping(),
        _arena(),
        _step_time(),
        _waiting(),
        _report(),
        _addresses(),
        _model_paper(),
        *_varying_lengths(),
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
    rows = [row for row in _rows("order_only") if row["how"] == "run"]
    many = {row["model"]: row for row in rows if row["batch_size"] == 32}
    lines = [
        [
            row["model"],
            _mib(row["eager_measured_bytes"]),
            _mib(row["measured_bytes"]),
            f"{row['measured_saving']:.1%}",
            f"{row['promise_error']:+.2%}",
            f"{many[row['model']]['measured_saving']:.1%}" if row["model"] in many else "",
        ]
        for row in rows
        if row["batch_size"] == 1
    ]
    return _section(
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
    rows = _rows("order_real")
    proven = sum(row["status"] == "optimal" for row in rows)
    operators = [row["operators"] for row in rows]
    return _section(
        "Orders that are proven",
        "order_real",
        "python -m bench.order_real",
        f"{proven} of {len(rows)} training steps, of {min(operators):,} to {max(operators):,} operators, end with the proof"
        f" that no order needs less.\nThe slowest takes {max(row['cpu_s'] for row in rows):.2f} s of processor time.",
    )


def _equal() -> str:
    said = []
    for name, how in (("equal", "without a limit"), ("equal_limited", "under a limit of time (1.5 times) and in an arena")):
        rows = [row for row in _rows(name) if row["tensors"] is not None]
        tensors, different = sum(row["tensors"] for row in rows), sum(row["different"] for row in rows)
        said.append(f"- {how}: {len(rows)} networks, {tensors:,} tensors, {different} different (`{name}.json`).")
    text = (
        "Three steps of eager PyTorch and of lowtide, with six optimizers in turn. Parameters, buffers, state and losses\nare compared.\n\n"
    )
    return _section("Equal to the last bit", "equal", "python -m bench.equal", text + "\n".join(said))


def _limits() -> str:
    rows = _rows("budget")
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of = {row["setting"]: row for row in rows if row["model"] == model}
        lowest = min(row["peak_bytes"] for row in rows if row["model"] == model and row["setting"] == "lowtide")
        lines.append(
            [
                f"{model}, batch {of['eager']['batch_size']}",
                _mib(of["eager"]["peak_bytes"]),
                _mib(of["checkpoint"]["peak_bytes"]),
                _ratio(of["checkpoint"], of["eager"], "eager"),
                _ratio(of["lowtide at checkpoint"], of["checkpoint"], "peer"),
                _ratio(of["lowtide arena at checkpoint"], of["checkpoint"], "peer"),
                _mib(lowest),
            ]
        )
    limited = [row for row in rows if row.get("limit_bytes")]
    kept = sum(row["kept"] == "yes" for row in limited)
    off = max(abs(row["promise_off"]) for row in limited if row["promise_off"] is not None)
    exact = f" to within {off:.3%}" if off else ", to the byte"
    return _section(
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
    names = [row["network"] for row in _rows("magis") if row["moves"] == "swap" and "," not in row["network"]]
    found = {(row["network"], row["moves"]): row for row in _rows("magis")}
    lines = [
        [network, *(_percent(found[network, moves][f"overhead_at_{share}"]) for moves in ("recompute", "swap") for share in (80, 40))]
        for network in names
    ]
    return _section(
        "Recomputation and swapping, simulated",
        "magis",
        "python -m bench.magis",
        "MAGIS's workloads as their authors describe the networks: whole steps on the roofline of an RTX 3090. Shares are of\n"
        "eager's peak, parameters included. The table is the time that a limit adds.\n"
        f"{_searched()}",
        ("", "recomputation, 80 %", "40 %", "with swapping, 80 %", "40 %"),
        lines,
    )


def _searched() -> str:
    """With which effort, and what the default is."""
    default = sum(sweep.max_states for sweep in Effort.NORMAL.sweeps)
    return f"The search is `Sweep()`, of {Sweep().max_states:,} schedules; the default effort looks at {default:,} at most."


def _arena() -> str:
    rows = _rows("arena")
    lines = [
        [
            f"{row['model']}, batch {row['batch_size']}",
            _agreed(row, "arena_ms"),
            f"{row['served_share']:.2%}",
            f"{row['growth_over_planned'] - 1:+.1%}",
        ]
        for row in rows
    ]
    return _section(
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
        for row in _rows("step_time")
    ]
    return _section(
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
        for row in _rows("planning_time")
    ]
    return _section(
        "Waiting",
        "planning_time",
        "python -m bench.planning_time",
        'Seconds of wall clock from the model to the step with `memory="60%"`, kernels compiled: with all operators known, with none,\n'
        "for another limit by `step.at`, in another process that asks the same, and for `lowtide.explain`. Last, the time that 60 %\n"
        "adds, by the default effort and by the thorough one.",
        ("", "operators", "step", "operators unknown", "other limit", "asked again", "explain", "60 % adds"),
        lines,
    )


def _report() -> str:
    lines = [
        [f"{row['operators']:,}", _mib(row["page_bytes"]), f"{row['write_s']:.2f}", f"{row['open_ms']:.0f}"] for row in _rows("report")
    ]
    return _section(
        "The page of a plan",
        "report",
        "python -m bench.report",
        "What `step.report` writes, of made-up steps under a limit, and how long Chromium takes to open it, its script included.",
        ("operators", "MiB", "seconds to write", "milliseconds to open"),
        lines,
    )


def _addresses() -> str:
    rows = [row for row in _rows("place") if row["solver"] == "auto"]
    fits = [row for row in rows if row["minimalloc_cpu_s"] is not None]
    lines = [[row["instance"], f"{row['buffers']:,}", f"{row['cpu_s']:.2f}", f"{row['minimalloc_cpu_s']:.2f}"] for row in fits]
    others = [row for row in rows if row["question"] == "smallest" and row["buffers"] > 500]
    said = [
        f"- {row['instance']}, {row['buffers']:,} buffers: {row['cpu_s']:.2f} s, "
        + ("at the proven bound" if not row["above_percent"] else f"{row['above_percent']:.2f} % above the proven bound")
        for row in others
    ]
    models = _rows("place_models")
    exact = [row for row in models if row["alignment"] == 1]
    slowest_s = max(row["cpu_s"] for row in exact)
    at_bound = sum(row["above"] == 0 for row in exact)
    said.append(f"- {len(exact)} training steps: {at_bound} at the bound, in at most {slowest_s:.2f} s (`place_models.json`)")
    return _section(
        "Addresses",
        "place",
        "python -m bench.place",
        "Minimalloc's instances within 1 MiB, processor seconds.",
        ("", "buffers", "lowtide", "minimalloc"),
        lines,
        after="The smallest arena of larger ones:\n\n" + "\n".join(said),
    )


def _model_paper() -> str:
    table = _rows("model_paper")
    rows = [row for row in table if row["network"] not in ("mean", "MODeL")]
    lines = []
    for inputs, what in (("paper", "MODeL's inputs"), ("list", "larger inputs")):
        for batch_size in (1, 32):
            of = {row["network"]: row for row in table if row["inputs"] == inputs and row["batch_size"] == batch_size}
            figures = (of["mean"]["saving"], of["mean"]["saving_1_11"], of["MODeL"]["saving"])
            lines.append([f"{what}, batch {batch_size}", *(f"{figure:.1%}" for figure in figures)])
    seconds = [row["planning_s"] for row in rows]
    return _section(
        "Against PyTorch's CUDA allocator",
        "model_paper",
        "python -m bench.model_paper",
        "MODeL's experiments: order and addresses together, against the caching allocator with its fragmentation, simulated rule by rule.\n"
        "MODeL was measured on PyTorch 1.11, whose loop keeps its gradients. Its own figures are from the paper.\n"
        f"Planning takes {statistics.median(seconds):.2f} s in the median, {max(seconds):.1f} s at worst.",
        ("mean of eleven networks", "less than PyTorch", "less than PyTorch 1.11", "MODeL"),
        lines,
    )


def _varying_lengths() -> Iterable[str]:
    """What there are files of."""
    if (RESULTS / "dynamic.json").exists():
        yield _trained_on_varying_lengths()
    if (RESULTS / "dynamic_planned.json").exists():
        yield _planned_for_varying_lengths()
    if (RESULTS / "dynamic_equal.json").exists():
        yield _equal_over_ranges()
    if (RESULTS / "dynamic_near.json").exists():
        yield _near_each_shapes_own()
    if (RESULTS / "dynamic_overhead.json").exists():
        yield _what_a_range_costs()


def _trained_on_varying_lengths() -> str:
    rows = _rows("dynamic")
    lines = [
        [
            f"{row['batch_size']}, {row['variant']}",
            f"{row['tokens_per_s']:,.0f}",
            f"{_mib(row['peak_bytes'])}, {row['within']}",
            f"{row['compilations']}",
            f"{row['first_step_s']:.1f}",
            f"{row['first_pass_s']:.1f}",
        ]
        for row in rows
        if row["tokens_per_s"]
    ]
    failed = "; ".join(f"{row['batch_size']}, {row['variant']}: {row['failed']}" for row in rows if not row["tokens_per_s"])
    return _section(
        "Batches of varying lengths",
        "dynamic",
        "python -m bench.dynamic",
        "BladeDISC++'s table on this machine: a Llama of 4 layers, fine-tuned on samples whose lengths fall as CodeAlpaca-20K's do (a\n"
        f"histogram made by hand), in {_mib(rows[0]['limit_bytes'])} MiB. Tokens that are padding do not count. A CPU's allocator has no\n"
        "limit: who passes it is said to be over. Seconds until the first step, and for the first time through all batches, hold all\n"
        "that is compiled, captured, measured and planned. BladeDISC++'s method is this project's own implementation of it.",
        ("batch size, way", "tokens a second", "peak, MiB", "compilations", "first step, s", "first pass, s"),
        lines,
        after=f"Failed: {failed}." if failed else "",
    )


def _planned_for_varying_lengths() -> str:
    rows = _rows("dynamic_planned")
    lines = [
        [
            f"{row['batch_size']} x {row['length']}",
            *(f"{row[key] / 2**30:.2f}" for key in ("eager_peak_bytes", "lowtide_peak_bytes")),
            _overhead(row["lowtide_us"] / row["eager_us"]),
            f"{row['paper_held_bytes'] / 2**30:.2f}",
            _overhead(row["paper_us"] / row["eager_us"]),
        ]
        for row in rows
        if not row["failed"]
    ]
    return _section(
        "Varying lengths at BladeDISC++'s widths, planned",
        "dynamic_planned",
        "python -m bench.dynamic.planned",
        "Llama-2 7B's widths, 4 layers, planned within 40 GiB of an A100, by roofline: nothing was run. Both may copy tensors to the\n"
        "host. BladeDISC++'s method, in this project's own implementation and in the better of two orders, decides when memory is\n"
        "short, operator by operator; lowtide plans ahead. A batch is of samples times tokens; times are against no limit.",
        ("batch", "eager, GiB", "lowtide, GiB", "time", "BladeDISC++'s method, GiB", "time"),
        lines,
    )


def _equal_over_ranges() -> str:
    lines = [
        [
            f"{row['network']}, {row['memory'] or 'no limit'}",
            f"{row['different']} of {row['steps']}",
            f"{row['parts']}, {row['members']}",
            f"{row['over_limit']} of {row['measured']}",
            f"{row['unkept']} of {row['measured']}",
            f"{row['worst_bytes_off']:,}",
        ]
        for row in _rows("dynamic_equal")
    ]
    return _section(
        "One step for a range, bit for bit and byte for byte",
        "dynamic_equal",
        "python -m bench.dynamic.equal",
        "Small networks trained on batches of random shapes, dropout on, beside eager PyTorch: steps after which a loss, a parameter, a\n"
        "buffer, the optimizer's state or the generator's is not equal to the last bit. Then measured peaks at other random shapes: how\n"
        "many are above the limit, or further off their promise than 1 % and 1 MiB, and how far the worst is.",
        ("network, limit", "different", "parts, programs", "over the limit", "promise not kept", "bytes off at worst"),
        lines,
    )


def _near_each_shapes_own() -> str:
    lines = [
        [
            f"{row['network']}, {row['memory'] or 'no limit'}",
            f"{row['shapes']}",
            f"{row['members']}",
            *(f"{row[key]:.3f}" for key in ("worst_peak_ratio", "worst_time_ratio", "median_time_ratio")),
            *(f"{row[key]:.3f}" for key in ("worst_measured_peak_ratio", "worst_measured_time_ratio") if row[key] is not None),
        ]
        for row in _rows("dynamic_near")
    ]
    return _section(
        "A range against plans for each shape alone",
        "dynamic_near",
        "python -m bench.dynamic.near",
        "What the step for a range runs at random shapes, over the plan that is searched for that shape alone: simulated peak and time,\n"
        "and at three of them measured peak and processor time of a step that was captured for it. Ratios above 1 are the range's loss.",
        ("network, limit", "shapes", "programs", "worst peak", "worst time", "median time", "measured: worst peak", "worst time"),
        lines,
    )


def _what_a_range_costs() -> str:
    lines = [
        [row["question"], f"{row['operators']:,}", *(f"{row[key]:,.3g}" for key in ("static", "ranged", "difference", "ratio")), row["bar"]]
        for row in _rows("dynamic_overhead")
    ]
    return _section(
        "What a range costs beside one shape",
        "dynamic_overhead",
        "python -m bench.dynamic.overhead",
        "GPT-2 of small width in training mode with AdamW: a call with the program taken out, at new and at known shapes; whole steps;\n"
        "and the time from the call of `optimize` to the step, kernels compiled and operators measured before.",
        ("question", "operators", "one shape", "range", "difference", "ratio", "bar"),
        lines,
    )


def _section(
    title: str, name: str, command: str, text: str, head: Sequence[str] = (), lines: Iterable[Sequence[str]] = (), after: str = ""
) -> str:
    parts = [f"## {title}", text]
    if head:
        rows = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join([*parts, *([after] if after else []), f"`{command}`, `bench/results/{name}.json`. {_machine(name)}"])


def _machine(name: str) -> str:
    """What a file was measured on: machine, versions, code."""
    document = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    on = document["machine"]
    threads = f"{on['threads']} thread{'s' if on['threads'] > 1 else ''}"
    versions = f"Python {on['python']}, torch {on['torch']}, numba {on['numba']}"
    return f"{on['processor']}, {on['cores']} cores, {threads}, {versions}, {_code(name, document)}."


def _code(name: str, document: Row) -> str:
    if "code" in document:
        commit = f"commit {document['code']}" if document["code"] else "outside of a checkout"
        return f"{commit}. Since then {_SINCE[name]}" if name in _SINCE else commit
    commit, since = _EARLIER[name]
    return f"commit {commit}. Since then {since}"


def _rows(name: str) -> list[Row]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def _ratio(row: Row, base: Row, against: str) -> str:
    return _if_agreed(row[f"wall_to_{against}"], row[f"cpu_to_{against}"], row["wall_ms"] / base["wall_ms"])


def _agreed(row: Row, own_ms: str) -> str:
    return _if_agreed(row["wall_ratio"], row["cpu_ratio"], row[own_ms] / row["eager_ms"])


def _if_agreed(*readings: float) -> str:
    return f"{readings[0]:.2f}" if max(readings) - min(readings) <= APART else NO_FIGURE


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f}"


def _overhead(ratio: float) -> str:
    return f"{round(ratio - 1, 4) + 0.0:+.1%}"  # no "-0.0%"


def _percent(overhead: float | None) -> str:
    return "not found" if overhead is None else f"{overhead:+.1%}"


if __name__ == "__main__":
    main()
