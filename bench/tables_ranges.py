"""The sections of the results page about sizes that vary."""

from __future__ import annotations

from collections.abc import Iterable

from bench.results import RESULTS
from bench.tables_parts import mib, overhead, rows_of, section


def varying_lengths() -> Iterable[str]:
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
    if (RESULTS / "dynamic_foreign.json").exists():
        yield _programs_of_others()


def _trained_on_varying_lengths() -> str:
    rows = rows_of("dynamic")
    lines = [
        [
            f"{row['batch_size']}, {row['variant']}",
            f"{row['tokens_per_s']:,.0f}",
            "" if row["against_eager"] is None else f"{row['against_eager']:.2f}",
            f"{mib(row['peak_bytes'])}, {row['within']}",
            f"{row['compilations']}",
            f"{row['first_step_s']:.1f}",
            f"{row['first_pass_s']:.1f}",
        ]
        for row in rows
        if row["tokens_per_s"]
    ]
    failed = "; ".join(f"{row['batch_size']}, {row['variant']}: {row['failed']}" for row in rows if not row["tokens_per_s"])
    return section(
        "Batches of varying lengths",
        "dynamic",
        "python -m bench.dynamic",
        "BladeDISC++'s table on this machine: a Llama of 4 layers, fine-tuned on samples whose lengths fall as CodeAlpaca-20K's do (a\n"
        f"histogram made by hand), in {mib(rows[0]['limit_bytes'])} MiB. Tokens that are padding do not count. A CPU's allocator has no\n"
        "limit: who passes it is said to be over. Seconds until the first step, and for the first time through all batches, hold all\n"
        "that is compiled, captured, measured and planned. BladeDISC++'s method is this project's own implementation of it.",
        ("batch size, way", "tokens a second", "over eager's", "peak, MiB", "compilations", "first step, s", "first pass, s"),
        lines,
        after=f"Failed: {failed}." if failed else "",
    )


def _planned_for_varying_lengths() -> str:
    rows = rows_of("dynamic_planned")
    lines = [
        [
            f"{row['batch_size']} x {row['length']}",
            *(f"{row[key] / 2**30:.2f}" for key in ("eager_peak_bytes", "lowtide_peak_bytes")),
            overhead(row["lowtide_us"] / row["eager_us"]),
            f"{row['paper_held_bytes'] / 2**30:.2f}",
            overhead(row["paper_us"] / row["eager_us"]),
        ]
        for row in rows
        if not row["failed"]
    ]
    return section(
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
        for row in rows_of("dynamic_equal")
    ]
    return section(
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
        for row in rows_of("dynamic_near")
    ]
    return section(
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
        [
            f"{row['question']}, {row['layers']} layers",
            f"{row['operators']:,}",
            *(f"{row[key]:,.3g}" for key in ("static", "ranged", "difference", "ratio")),
            row["bar"],
        ]
        for row in rows_of("dynamic_overhead")
    ]
    return section(
        "What a range costs beside one shape",
        "dynamic_overhead",
        "python -m bench.dynamic.overhead",
        "GPT-2 of small width in training mode with AdamW: a call with the program taken out, at new and at known shapes; whole steps;\n"
        "and the time from the call of `optimize` to the step, kernels compiled and operators measured before.",
        ("question", "operators", "one shape", "range", "difference", "ratio", "bar"),
        lines,
    )


def _programs_of_others() -> str:
    rows = rows_of("dynamic_foreign")
    ways = dict.fromkeys(row["way"] for row in rows)
    subjects = dict.fromkeys(row["subject"] for row in rows)
    verdicts = {(row["subject"], row["way"]): row["verdict"] for row in rows}
    lines = [[subject, *(verdicts.get((subject, way), "") for way in ways)] for subject in subjects]
    others = [f"{row['subject']}, {row['way']}: {row['verdict']}, {row['why']}" for row in rows if row["verdict"] != "right"]
    return section(
        "Programs that nobody here wrote, over ranges",
        "dynamic_foreign",
        "python -m bench.dynamic.foreign",
        "Architectures of transformers, timm and torch.nn at small sizes: rows and lengths of their batches are dimensions, dropout on,\n"
        "AdamW trains. Right is: eight steps of random shapes are eager's to the last bit, and four further peaks what was promised, to\n"
        "1 % or 1 MiB, and within the limit.",
        ("program", *ways),
        lines,
        after="\n".join(f"- {each}" for each in others),
    )
