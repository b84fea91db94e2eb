"""How near is what a range runs to the plan that each shape would have alone?

    python -m bench.dynamic.near [--only NAME ...] [--shapes 20] [--measured 3]

At random shapes of its range each network's member is compared with the plan that is searched for that shape alone, of the same operators'
bytes and times: without a limit by peak, within one by time, both as simulated. At some of them both are run: the step for the range, and
one that is captured and planned for that shape alone, within as many bytes; measured peaks, and processor time in turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

import lowtide
from bench.dynamic.equal import Trained, networks
from bench.in_values import in_values
from bench.results import Results, with_kept
from lowtide.planning.planner import Planner
from lowtide.ranges.family import PlanFamily

COLUMNS = (
    "network", "memory", "shapes", "members", "worst_peak_ratio", "worst_time_ratio", "median_time_ratio",
    "measured", "worst_measured_peak_ratio", "worst_measured_time_ratio", "median_measured_time_ratio",
)  # fmt: skip
NOTES = (
    "ratios: of the member that the range runs to the plan searched for that shape alone; simulated ones of the same operators' bytes and"
    " times, measured ones of two steps on one model, in turns: the median of both's ratios of processor time",
    "worst_peak_ratio is of the bar without a limit (1.02), worst_time_ratio of that within one (1.05)",
)
_TURNS = 21


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(networks()), metavar="NAME")
    parser.add_argument("--shapes", type=int, default=20)
    parser.add_argument("--measured", type=int, default=3)
    parser.add_argument("--memory", nargs="+", default=["none", "75%"], help='limits, "none" for none')
    parser.add_argument("--keep", action="store_true", help="keep the rows of the saved table that are not measured now")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.only:
        for memory in options.memory:
            rows.append(row(name, None if memory == "none" else memory, options.shapes, options.measured))
            print(rows[-1], flush=True)
            results = Results(
                "dynamic_near",
                "A range against plans for each shape alone",
                COLUMNS,
                with_kept("dynamic_near", rows, ("network", "memory")) if options.keep else tuple(rows),
                NOTES,
            )
            results.save()
    results.print()


def row(name: str, memory: str | None, shapes: int, measured: int) -> dict[str, Any]:
    """One network under one limit."""
    trained, draws = networks()[name], random.Random(1)
    step, family_at = _ranged(trained, memory, draws)
    found, members = [], 0
    drawn = [trained.shape(draws) for _ in range(shapes)]
    for shape in drawn:
        family, point = family_at(trained.batch(*shape))
        members = max(members, len(family.members))
        found.append(_simulated(family, point))
    peaks, times = zip(*found, strict=True)
    runs = [_measured(step, trained, shape) for shape in drawn[:measured]]
    return {
        "network": name, "memory": memory or "", "shapes": shapes, "members": members, "worst_peak_ratio": max(peaks),
        "worst_time_ratio": max(times), "median_time_ratio": statistics.median(times), "measured": len(runs),
        "worst_measured_peak_ratio": max((peak for peak, _ in runs), default=None),
        "worst_measured_time_ratio": max((us for _, us in runs), default=None),
        "median_measured_time_ratio": statistics.median(us for _, us in runs) if runs else None,
    }  # fmt: skip


def _ranged(trained: Trained, memory: str | None, draws: random.Random) -> tuple[Any, Any]:
    """A step for the range, and what finds the family of later steps and the point of a batch."""
    torch.manual_seed(0)
    model = trained.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {"loss": trained.loss, "optimizer": optimizer, "memory": memory, "dynamic": trained.dynamic, "progress": False}
    step = lowtide.optimize(model, trained.batch(*trained.shape(draws)), **in_values(**settings))
    step(**trained.batch(*trained.shape(draws)))  # the optimizer has its state from here on

    def family_at(batch: dict[str, torch.Tensor]) -> tuple[PlanFamily, Mapping[str, int]]:
        step.plan_for(**batch)  # another part of the range is captured where it has to be
        maker = step._maker
        point = maker._varying.point([tuple(each.shape) for each in batch.values()])
        served = next(each for each in maker._served if each.region.takes(point, list(batch.values())))
        return served.families[-1], served.region.own(point)

    return step, family_at


def _simulated(family: PlanFamily, point: Mapping[str, int]) -> tuple[float, float]:
    """Ratios of peaks and of times; 1 where there is no limit for what the other one is bound by."""
    (own,) = Planner([[each.uncached_at(point) for each in family.candidates]]).plans(replace(family.request, watcher=None))
    peak = family.peak_bytes(point) / own.peak_bytes
    return peak, 1.0 if own.cost_report is None else family.time_us(point) / own.cost_report.time_us


def _measured(step: Any, trained: Trained, shape: tuple[int, ...]) -> tuple[float, float]:
    """The same of the step for the range and one for this shape alone, both on the same model and optimizer."""
    program, limit = step._maker.capturing.program, step._maker.settings.limit.memory_bytes
    batch = trained.batch(*shape)
    settings = {"loss": trained.loss, "optimizer": program.optimizer, "memory": limit, "progress": False}
    alone = lowtide.optimize(program.model, batch, **in_values(**settings))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peaks = [each.measure(**batch).peak_bytes for each in (step, alone)]
    taken: list[list[float]] = [[], []]
    for turn in range(_TURNS):
        for which in (0, 1) if turn % 2 else (1, 0):
            begun = time.process_time()
            (step, alone)[which](**batch)
            taken[which].append(time.process_time() - begun)
    return peaks[0] / peaks[1], statistics.median(one / other for one, other in zip(*taken, strict=True))


if __name__ == "__main__":
    main()
