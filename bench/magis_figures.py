"""MAGIS's figures 12 and 16, of our own: micro-batches by hand against splits that are searched, and U-Net's memory over a step.

    python -m bench.magis_figures [--workloads NAME ...] [--only micro unet]

Micro-batches: the step with its batch cut by hand into 1, 2, 4 and 8 (`accumulate`), computed again and swapped within 40 % and 20 % of
eager's peak, and the search over splits (`exact=False`), which finds what to cut and into how many. U-Net: what lives when, as written and
within 80 % and 60 %. All on the roofline of rtx3090; times are over the least without a limit.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import lowtide
from bench.in_values import in_values
from bench.magis_workloads import CASES, Case
from bench.models.workload import plain_sgd
from bench.picture import THEMES, Curve, draw_curves
from bench.results import RESULTS, Cell, Results

DEVICE = "rtx3090"
SHARES, CUTS = (0.4, 0.2), (1, 2, 4, 8)
COLUMNS = ("workload", "how", "kept_peak_share", "time", "overhead_at_40", "overhead_at_20", "least_share")
NOTES = (
    "shares are of the peak of eager PyTorch with the whole batch; overheads over the least time of all rows of a workload without a limit",
    "time: without a limit, over that of the whole batch as written",
    "n by hand: the batch in n micro-batches, whose losses are averaged; batch norms then see less at once, so that these are other steps",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--workloads", nargs="+", default=["BERT-base", "ViT-base", "ResNet-50", "U-Net"], choices=names, metavar="NAME")
    parser.add_argument("--only", nargs="+", default=["micro", "unet"], choices=["micro", "unet"])
    options = parser.parse_args()
    if "unet" in options.only:
        print(_unet())
    rows: list[Mapping[str, Cell]] = []
    for case in (case for case in CASES if "micro" in options.only and case.name in options.workloads):
        rows += _rows(case)
        table = Results("magis_micro", "Micro-batches by hand and splits that are searched", COLUMNS, tuple(rows), NOTES)
        table.save()
        table.print()


def _step(case: Case, **asked: Any) -> Any:
    made = case.published[0].build(case.batch_size, "meta")
    settings: dict[str, Any] = {"simulate": DEVICE, "progress": False} | asked
    return lowtide.optimize(made.model, made.batch, loss=made.loss, optimizer=plain_sgd(made.model), **in_values(**settings))


def _rows(case: Case) -> list[Mapping[str, Cell]]:
    ways: dict[str, Mapping[str, Any]] = {f"{cut} by hand" if cut > 1 else "whole": {"accumulate": cut} for cut in CUTS}
    plans = {how: _step(case, latency=1.1, swap=True, **asked).plan for how, asked in (ways | {"searched": {"exact": False}}).items()}
    eager_bytes, whole_us = plans["whole"].eager_peak_bytes, plans["whole"].cost_report.order_us
    least_us = min(plan.cost_report.order_us for plan in plans.values())

    def overhead(frontier: Any, share: float) -> float | None:
        times = [us for peak, us in frontier if peak <= share * eager_bytes]
        return min(times) / least_us - 1 if times else None

    return [
        {
            "workload": case.name, "how": how, "kept_peak_share": plan.cost_report.order_peak_bytes / eager_bytes,
            "time": plan.cost_report.order_us / whole_us, "least_share": plan.cost_report.frontier[0][0] / eager_bytes,
        } | {f"overhead_at_{share:.0%}".rstrip("%"): overhead(plan.cost_report.frontier, share) for share in SHARES}
        for how, plan in plans.items()
    ]  # fmt: skip


def _unet() -> Any:
    """U-Net's memory over one step, as written and within two limits: computed again, and in parts."""
    case = next(case for case in CASES if case.name == "U-Net")
    curves = []
    for name, asked in (("as written", None), ("within 80 %", "80%"), ("within 60 %", "60%")):
        plan = _step(case, swap=False, exact=False, **({"memory": asked} if asked else {})).plan
        curves.append(Curve.of(name, plan.graph, plan.order if asked else range(len(plan.graph.nodes))))
    return draw_curves(curves, THEMES[0], "U-Net, batch 32, SGD: memory over one training step", RESULTS / "magis_unet.png")


if __name__ == "__main__":
    main()
