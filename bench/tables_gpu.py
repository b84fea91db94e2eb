"""The sections of the results page on a GPU."""

from __future__ import annotations

from bench.tables_parts import Row, rows_of, section

_KEPT = {"kept": "", "off": "off", "measured": "", "does not fit": "does not fit"}


def on_a_gpu() -> tuple[str, ...]:
    """Five networks within limits, beside what people use; processes that are held to theirs; what a plan gains by the host's memory."""
    return _limits(), _survival(), _host_memory()


def _limits() -> str:
    rows = [row for row in rows_of("on_gpu") if row["part"].startswith(("limits: ", "peers: ")) and row["verdict"] in _KEPT]
    exact = [row for row in rows_of("on_gpu") if row["part"].startswith("exact: ")]
    equal = sum(row["verdict"] == "right" for row in exact)
    devices = ", ".join(dict.fromkeys(row["device"] for row in rows))
    return section(
        "On a GPU",
        "on_gpu",
        "make gpu",
        f"{devices}: training steps with AdamW under autocast to bfloat16. They are gpt2 8 x 1024, resnet50 x 64 in\n"
        "channels_last, a Llama of 1.1 B parameters 4 x 1024, vit_b_16 x 64, bert-base x 32. Milliseconds are medians of ten,\n"
        "in turns with eager's. Other parts planned on other cores meanwhile, which makes steps that wait for the host up to a\n"
        "third slower. GB are above what is there when a step begins, for eager with the gradients of the last one; reserved is\n"
        f"all that the process held. Eager ran foreach kernels, lowtide single-tensor formulas, as it then did. Of {len(exact)} networks\n"
        f"compared with eager after three steps {equal} were equal to the last bit; the others were refused, out of time, or\n"
        "differ between two runs of eager.",
        ("network", "limit", "promised ms", "measured ms", "over eager", "promised GB", "measured GB", "reserved GB", ""),
        map(_line, rows),
    )


def _survival() -> str:
    rows = rows_of("survival")
    limits = list(dict.fromkeys(row["limit"] for row in rows if row["limit"]))
    lines = []
    for network in dict.fromkeys(row["network"] for row in rows):
        of_limit = {limit: [row for row in rows if (row["network"], row["limit"]) == (network, limit)] for limit in limits}
        lines.append([network, *(_steps(of_limit[limit]) for limit in limits)])
    devices = ", ".join(dict.fromkeys(row["device"] for row in rows if row["device"]))
    lives, tried = sum(row["verdict"] == "lives" for row in rows), sum(row["verdict"] != "does not fit" for row in rows)
    return section(
        "Processes held to their limits",
        "survival",
        "python -m bench.on_gpu.survival",
        f"{devices}: steps with AdamW that were run within 100 to 20 % of what eager's step makes, and within five limits\n"
        "drawn at random. `set_per_process_memory_fraction` holds each process to what the plan promises that PyTorch's allocator\n"
        "will reserve, with 24 MiB for the caller's own. Every tenth step an evaluation and other tensors come between. A dash is a\n"
        f"limit below what any plan takes, mostly as one operator takes it: all layers of an LSTM are one. {lives} of {tried} lived.",
        ("network", *limits),
        lines,
    )


def _steps(rows: list[Row]) -> str:
    """How many ran at a limit, or the worst that became of it."""
    bad = [row["verdict"] for row in rows if row["verdict"] not in ("lives", "does not fit")]
    return bad[0] if bad else " ".join(str(row["steps"]) if row["verdict"] == "lives" else "-" for row in rows)


def _host_memory() -> str:
    rows = [row for row in rows_of("host_bytes") if row["host_gib"] in (0, 8, 16, 32, None) or "between" in row["model"]]
    lines = [
        [
            f"{row['model']}, {row['optimizer']}", str(row["device_gib"]), "-" if row["host_gib"] is None else str(row["host_gib"]),
            f"{row['slower_percent']:.1f}", f"{row['bound_percent']:.1f}", f"{row['pinned_gib']:.1f}", f"{row['planning_cpu_s']:.0f}",
        ]
        for row in rows
        if row["slower_percent"] is not None
    ]  # fmt: skip
    return section(
        "Memory of the host",
        "host_bytes",
        "python -m bench.host_bytes",
        "A simulated H100, nothing ran: what time a step takes more than without any limit, in percent, within so many GiB of the device\n"
        "and of the host (0: nothing goes there, -: no limit of the host), by the quick effort. The bound holds whatever is pinned.\n"
        "Between steps: the optimizer's state lies on the host then; without a limit its copies are hidden.",
        ("network", "device GiB", "host GiB", "more time %", "bound %", "pinned GiB", "planning s"),
        lines,
    )


def _line(row: Row) -> list[str]:
    figures = (_number(row.get("promised_ms"), 1, 1), _number(row.get("step_ms"), 1, 1), _number(row.get("measured_ratio"), 1, 2))
    memory = (_number(row.get(f"{name}_bytes"), 1e9, 3) for name in ("promised", "measured", "reserved"))
    return [row["part"].split(": ", 1)[1].split(",")[0], row["setting"], *figures, *memory, _KEPT[row["verdict"]]]


def _number(figure: float | None, unit: float, digits: int) -> str:
    return "" if figure is None else f"{figure / unit:.{digits}f}"
