"""Which operators share a kernel: by the model, as measured, and none; the same networks beside each other in one process.

    python -m bench.ago.tuning --threads 1
    python -m bench.ago.tuning --threads 2 --cases "mobilenet_v2 224"

Each region of a network is made three times: with the blocks that the model chooses, with those that measurements say where the model
cannot tell, and without any. They run in turns; a time is the median over turns of the least of a turn's runs. "differ" is by how many of
the windows around which blocks can be made the measured choice is another than the model's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import lowtide
from bench.ago.blocks import none
from bench.ago.networks import case, paper_cases
from bench.results import Cell, Results, with_kept
from lowtide.cpu import networks as made
from lowtide.cpu.comparison import made_up
from lowtide.cpu.executable import target
from lowtide.cpu.network import StagedBody
from lowtide.cpu.trial import tuned
from lowtide.ir.bodies import Region, is_region

COLUMNS = ("case", "threads", "windows", "differ", "none_us", "model_us", "measured_us", "measured_to_model")
_TURNS, _RUNS = 12, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=[each.name for each in paper_cases()])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.cases:
        rows = with_kept("ago_tuning", [row(name, options.threads)], ("case", "threads"))
        results = Results("ago_tuning", "Which operators share a kernel, modelled and measured", COLUMNS, rows)
        results.save()
    results.print()


def row(name: str, threads: int) -> dict[str, Cell]:
    """A network; its regions together."""
    model, args = case(name).built()
    nodes = lowtide.optimize(model, args, exact=False).plan.graph.nodes
    regions = [Region.of(node) for node in nodes if is_region(node)]
    staged = [StagedBody.of(region.body, region.fixed, target()) for region in regions]
    modelled = [tuned(each, 0, made.placed) for each in staged]
    choices = {
        "none": list(map(none, staged)),
        "model": modelled,
        "measured": [each.joined for each in regions],
    }
    times = _times_us({how: _run_of(regions, numbers) for how, numbers in choices.items()})
    ratio = statistics.median(one / other for one, other in zip(times["measured"], times["model"], strict=True))
    return {
        "case": name,
        "threads": threads,
        "windows": sum(map(len, modelled)),
        "differ": sum(one != other for a, b in zip(modelled, choices["measured"], strict=True) for one, other in zip(a, b, strict=True)),
        **{f"{how}_us": statistics.median(taken) for how, taken in times.items()},
        "measured_to_model": ratio,
    }


def _run_of(regions: Sequence[Region], numbers: Sequence[tuple[int, ...]]) -> Callable[[], Any]:
    runs = [(made.running(each.body, each.fixed, joined), made_up(each.body)) for each, joined in zip(regions, numbers, strict=True)]
    return lambda: [run(*given) for run, given in runs]


def _times_us(runs: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {how: [] for how in runs}
    for turn in range(_TURNS):
        for how, run in runs.items():
            run()
            taken = [_seconds(run) for _ in range(_RUNS)]
            times[how] += [] if turn == 0 else [min(taken) * 1e6]
    return times


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
