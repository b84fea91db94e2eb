"""How much an answer depends on the times that were measured that day: times perturbed by 3 %, and what a limit then costs.

    python -m bench.stability [--only NAME ...] [--runs 10]

Steps are captured on the meta device, with the times of a simulated H100, and nothing is swapped. All operators of one time are perturbed
alike. What limits of 80, 60, 40 and 20 % of the peak of the orders add to the time is in percent of the fastest schedule's. "thorough" is
of the same times as the first run of the normal effort, which are not perturbed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

import lowtide
from bench.in_values import in_values
from bench.models import MODELS
from bench.models.workload import plain_sgd
from bench.results import Cell, Results, with_kept
from lowtide.planning.archive import CandidateArchive
from lowtide.planning.request import Effort
from lowtide.problems.order import Ints
from lowtide.remat.archive import Archive, Point
from lowtide.remat.cost import price_of
from lowtide.remat.problem import RematProblem
from lowtide.remat.sweep import Sweep

BATCHES = {"resnet50": 32, "unet": 8, "unetplusplus": 4, "mobilenet_v2": 32, "squeezenet1_0": 32, "r3d_18": 4, "vit_b_16": 16, "gpt2": 4}
SHARES = (80, 60, 40, 20)
COLUMNS = ("network", "limit_percent", "runs", "normal_percent", "thorough_percent", "least_percent", "most_percent", "search_cpu_s")
_DEVIATION = 0.03


@dataclass(frozen=True)
class Steps:
    """The graphs of one step as problems, and the orders that a search starts from."""

    problems: tuple[RematProblem, ...]
    orders: tuple[list[Ints], ...]

    @classmethod
    def captured(cls, name: str) -> Steps:
        """Of a model, as planning would search it."""
        work = MODELS[name].build(BATCHES[name], "meta")
        kept: list[CandidateArchive] = []
        search = CandidateArchive.by

        def keeping(self: CandidateArchive, *_: object) -> CandidateArchive:
            kept.append(self)
            raise KeyboardInterrupt

        CandidateArchive.by = keeping  # type: ignore[method-assign,assignment]
        try:
            settings = {"loss": work.loss, "optimizer": plain_sgd(work.model), "simulate": "h100", "progress": False}
            lowtide.optimize(work.model, work.batch, **in_values(memory="60%", **settings))
        except KeyboardInterrupt:
            if not kept:
                raise
        finally:
            CandidateArchive.by = search  # type: ignore[method-assign]
        return cls(tuple(problem.without_links for problem in kept[0].problems), kept[0].orders)

    def perturbed(self, seed: int) -> Steps:
        """With other times; those of seed 0 are as they were."""
        counts = np.cumsum([problem.problem.node_count for problem in self.problems])[:-1]
        factors = np.split(_factors(np.concatenate([_device_us(each) for each in self.problems]), seed), counts)
        return replace(self, problems=tuple(_times(*pair) for pair in zip(self.problems, factors, strict=True)))

    def overheads(self, sweep: Sweep) -> list[float | None]:
        """What each limit adds to the time, in percent; None where nothing fits."""
        pairs = [(which, order) for which, orders in enumerate(self.orders) for order in orders]
        archive = Archive.of(Point.of(self.problems[which], which, order) for which, order in pairs)
        archive.merge(sweep.explore(self.problems, self.orders))
        peak_bytes = max(price_of(self.problems[which], order)[0] for which, order in pairs)
        points = (archive.within(peak_bytes * share // 100) for share in SHARES)
        return [None if point is None else 100 * (point.time_us / archive.points[-1].time_us - 1) for point in points]


def _device_us(problem: RematProblem) -> NDArray[np.float64]:
    return problem.cost_us if problem.clocks is None else problem.clocks.device_us


def _factors(times_us: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """One for each time, the same for equal times."""
    different, which = np.unique(times_us, return_inverse=True)
    drawn = 1 + _DEVIATION * np.random.default_rng(seed).standard_normal(len(different)) * (seed > 0)
    return drawn[which]


def _times(problem: RematProblem, factors: NDArray[np.float64]) -> RematProblem:
    if problem.clocks is None:
        return replace(problem, cost_us=problem.cost_us * factors)
    clocks = problem.clocks._replace(device_us=problem.clocks.device_us * factors)
    return replace(problem, cost_us=clocks.price_us(problem.repeatable), clocks=clocks)


def rows(name: str, runs: int) -> list[dict[str, Cell]]:
    """One network, a line for each limit that is met."""
    steps = Steps.captured(name)
    thorough = steps.overheads(Effort.THOROUGH.sweeps[-1])
    start = time.process_time()
    normal = [steps.perturbed(seed).overheads(Effort.NORMAL.sweeps[-1]) for seed in range(runs)]
    cpu_s = (time.process_time() - start) / runs
    return [_row(name, share, [each[at] for each in normal], thorough[at], cpu_s) for at, share in enumerate(SHARES)]


def _row(name: str, share: int, normal: Sequence[float | None], thorough: float | None, cpu_s: float) -> dict[str, Cell]:
    known = [each for each in normal if each is not None]
    found: dict[str, Cell] = {"network": name, "limit_percent": share, "runs": len(known), "normal_percent": normal[0]}
    spread: dict[str, Cell] = {"least_percent": min(known, default=None), "most_percent": max(known, default=None)}
    return found | spread | {"thorough_percent": thorough, "search_cpu_s": round(cpu_s, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(BATCHES), choices=list(BATCHES), metavar="NAME")
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    for name in options.only:
        table = sorted(with_kept("stability", rows(name, options.runs), ["network", "limit_percent"]), key=_position)
        results = Results("stability", "Answers where measured times vary by 3 %", COLUMNS, tuple(table))
        results.save()
    results.print()


def _position(row: dict[str, Cell]) -> tuple[int, int]:
    return list(BATCHES).index(str(row["network"])), -int(row["limit_percent"] or 0)


if __name__ == "__main__":
    main()
