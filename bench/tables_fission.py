"""The sections of the results page on steps in parts: measured, and the search over graphs by itself."""

from __future__ import annotations

from bench.results import RESULTS
from bench.tables_parts import Row, mib, percent, ratio, rows_of, section


def in_parts() -> tuple[str, ...]:
    """Those whose files are there."""
    sections = {
        "in_parts": _measured,
        "budget_parts": _beside_checkpointing,
        "magis_outer": _search,
        "magis_micro": _by_hand,
        "halos": _halos,
    }
    return tuple(write() for name, write in sections.items() if (RESULTS / f"{name}.json").exists())


def _measured() -> str:
    lines = [
        [
            f"{row['model']}, {row['setting']}",
            *(_number(row, name, 1) for name in ("limit_mib", "peak_mib")),
            *(_number(row, name, 2) for name in ("cpu_to_unlimited", "cpu_to_eager", "promised_ratio")),
        ]
        for row in rows_of("in_parts")
    ]
    return section(
        "Steps in parts, measured",
        "in_parts",
        "python -m bench.in_parts",
        "Whole SGD steps, each setting a process of its own, in turns. MiB are above parameters and batch. Times are processor time: over\n"
        "lowtide's without a limit, and over eager's; last what the plan promised. Parts need `exact=False`.",
        ("", "limit", "peak", "over no limit", "over eager", "promised over no limit"),
        lines,
    )


def _beside_checkpointing() -> str:
    rows = rows_of("budget_parts")
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of = {row["setting"]: row for row in rows if row["model"] == model}
        checkpoint, *ours = (of[name] for name in ("checkpoint", "lowtide at checkpoint", "lowtide parts at checkpoint"))
        peaks = [mib(row["peak_bytes"]) for row in (of["eager"], checkpoint, *ours)]
        times = [ratio(checkpoint, of["eager"], "eager"), *(ratio(row, checkpoint, "peer") for row in ours)]
        lines.append([f"{model}, batch {checkpoint['batch_size']}", *peaks, *times])
    return section(
        "Steps in parts, beside checkpointing",
        "budget_parts",
        "python -m bench.budget --peers eager checkpoint --budgets 2 --no-arena --table budget_parts",
        "As under a limit above, whole steps within what checkpointing of each block takes: as captured, and in parts with\n"
        "`exact=False`. MiB above parameters and batch, measured; checkpointing's time over eager's, lowtide's over checkpointing's.",
        ("", "eager", "checkpointing", "lowtide", "in parts", "checkpointing's time", "lowtide's", "in parts"),
        lines,
    )


def _search() -> str:
    lines = [
        [
            f"{row['workload']}, {row['variant']}",
            str(row["states"]),
            _number(row, "states_per_minute", 0),
            *(percent(row[f"overhead_at_{share}"]) for share in (80, 40)),
            percent(row["least_share"]),
        ]
        for row in rows_of("magis_outer")
    ]
    return section(
        "What to run in parts, searched",
        "magis_outer",
        "python -m bench.magis_outer",
        "The search over graphs by itself on MAGIS's workloads, and without some of its parts: by first guesses of each graph alone,\n"
        "before any is searched in earnest. Overheads are over the least time without a limit, shares of the peak in program order.",
        ("", "graphs", "a minute", "80 %", "40 %", "least share"),
        lines,
    )


def _by_hand() -> str:
    lines = [
        [
            f"{row['workload']}, {row['how']}",
            _number(row, "time", 3),
            *(percent(row[name]) for name in ("overhead_at_40", "overhead_at_20")),
        ]
        for row in rows_of("magis_micro")
    ]
    return section(
        "Micro-batches by hand",
        "magis_micro",
        "python -m bench.magis_figures --only micro",
        "The batch cut by hand into so many micro-batches, computed again and swapped within a limit, and what a search over splits finds.",
        ("", "time without a limit", "40 %", "20 %"),
        lines,
    )


def _halos() -> str:
    lines = [
        [
            f"{row['side']} x {row['side']}, {row['how']}",
            _number(row, "peak_mib", 1),
            _number(row, "to_eager", 2),
            percent(row["rows_again"]),
        ]
        for row in rows_of("halos")
    ]
    return section(
        "Rows in strips, by hand",
        "halos",
        "python -m bench.halos",
        "U-Net for one picture. The level of full size runs in strips of rows, down and up again, each with the rows beside it that its\n"
        "convolutions look at. lowtide does not find this by itself yet: to it a convolution is closed along rows.",
        ("", "peak, MiB", "time over eager", "rows computed again"),
        lines,
    )


def _number(row: Row, name: str, digits: int) -> str:
    number = row.get(name)
    return "" if number is None else f"{number:,.{digits}f}"
