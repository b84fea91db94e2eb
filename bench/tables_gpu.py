"""The section of the results page on a GPU."""

from __future__ import annotations

from bench.tables_parts import Row, rows_of, section

_KEPT = {"kept": "", "off": "off", "measured": "", "does not fit": "does not fit"}


def on_a_gpu() -> tuple[str, ...]:
    """Five networks within limits, beside what people use."""
    return (_limits(),)


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


def _line(row: Row) -> list[str]:
    figures = (_number(row.get("promised_ms"), 1, 1), _number(row.get("step_ms"), 1, 1), _number(row.get("measured_ratio"), 1, 2))
    memory = (_number(row.get(f"{name}_bytes"), 1e9, 3) for name in ("promised", "measured", "reserved"))
    return [row["part"].split(": ", 1)[1].split(",")[0], row["setting"], *figures, *memory, _KEPT[row["verdict"]]]


def _number(figure: float | None, unit: float, digits: int) -> str:
    return "" if figure is None else f"{figure / unit:.{digits}f}"
