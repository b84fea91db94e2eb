"""The sections of the results page about where people train: frameworks, and a newcomer's half hour."""

from __future__ import annotations

from collections.abc import Iterable

from bench.results import RESULTS
from bench.tables_parts import rows_of, section


def where_people_train() -> Iterable[str]:
    """What there are files of."""
    if (RESULTS / "frameworks.json").exists():
        yield _frameworks()
    if (RESULTS / "half_hour.json").exists():
        yield _half_hour()
    if (RESULTS / "few_bits.json").exists():
        yield _few_bits()


def _few_bits() -> str:
    sizes = ("resident_mib", "eager_mib", "lowtide_mib", "promised_mib", "limit_mib")
    lines = [
        [
            f"{row['way']} ({row['library']})",
            *(_figure(row[size], 1) for size in sizes),
            _figure(row["time_ratio"], 2),
            _figure(row["limit_time_ratio"], 2),
            {"True": "yes", "False": "no"}[row["equal"]],
        ]
        for row in rows_of("few_bits")
    ]
    return section(
        "Few bits",
        "few_bits",
        "python -m bench.few_bits",
        "What people train with when memory is short, alone and with lowtide: MiB at rest (weights, state, batch), then above that:\n"
        "eager, lowtide, what it promised, and within 70 % of what eager takes. Times are of processors, over eager's. Equal: losses,\n"
        "parameters and states, to the last bit. What a library compiles runs as it is written on both sides.",
        ("way", "at rest", "eager", "lowtide", "promised", "limited", "time", "time, limited", "equal"),
        lines,
    )


def _frameworks() -> str:
    lines = [
        [
            f"{row['framework']}, {row['how']}",
            _figure(row["peak_mib"], 1),
            _figure(row["step_ms"], 0),
            _figure(row["time_ratio"], 2),
            _figure(row["to_checkpointing"], 2),
            _figure(row["first_step_s"], 1),
            {"True": "yes", "False": "no"}.get(row["losses_equal"], ""),
        ]
        for row in rows_of("frameworks")
        if row["peak_mib"] is not None
    ]
    return section(
        "Where people train",
        "frameworks",
        "python -m bench.frameworks",
        "A small Llama (4 layers, width 256, 4 x 256 tokens, float32, AdamW) in transformers' Trainer, Lightning and a loop\n"
        "with accelerate: alone, with gradient checkpointing, with lowtide without an arena and in one (which is the default in Trainer\n"
        "and Lightning), and within as many bytes as checkpointing took. Peaks above weights, measured; medians of a step, over the\n"
        "framework's own alone and checkpointed; the first step has capture and planning in it. Equal: losses to the framework's own,\n"
        "to the last bit. Two turns of 50 steps, alone on the machine. Without an arena a Trainer's step took up to 1.27 of its own time\n"
        "in another run: the C library gives pages back after a step or does not, as blocks happen to lie, and they come anew in the next\n"
        "one. An arena keeps them.",
        ("framework, way", "peak, MiB", "ms", "over alone", "over checkpointing", "first step, s", "equal"),
        lines,
    )


def _half_hour() -> str:
    rows = rows_of("half_hour")
    lines = [[row["block"], f"{row['seconds']:.0f}"] for row in rows]
    return section(
        "A newcomer's half hour",
        "half_hour",
        "python -m bench.half_hour",
        "The blocks of [the first half hour](half_hour.md), one behind the other in a clean folder, environment and cache; seconds of\n"
        f"wall clock, {sum(row['seconds'] for row in rows) / 60:.1f} minutes together, besides reading.",
        ("block", "s"),
        lines,
    )


def _figure(value: float | None, places: int) -> str:
    return "" if value is None else f"{value:.{places}f}"
