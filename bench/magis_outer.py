"""The search over graphs by itself, and what each of its parts is worth: MAGIS's ablations (its section 7.2.5), on its workloads.

    python -m bench.magis_outer [--workloads NAME ...] [--states N]

Each row judges graphs of one workload, as its authors describe it, on rtx3090 with swapping: by first guesses alone, before any of them is
searched in earnest. "all" is as planning does; "L = 2" and "L = 8" cut scores into other numbers of levels; "no heat" takes every tensor
for one that stands at the peak; "no filter" tries every set that dominators give; "no algebra" and "no fission" leave those graphs out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from bench.magis_workloads import CASES, Case
from bench.models.workload import plain_sgd
from bench.results import Cell, Results
from lowtide.capture.program import TrainingProgram, capture_training
from lowtide.capture.trace import Given
from lowtide.cost.device import Device
from lowtide.cost.presets import preset
from lowtide.ir.graph import Graph, Storage
from lowtide.planning.candidate import equal_graphs
from lowtide.rewrite.rewritings import Rewriting, rewritings
from lowtide.split.judge import Judge, JudgedGraph, Prices
from lowtide.split.rewrite import Loops
from lowtide.split.search import FissionSearch, Root, SearchWidth, prepared, worth_parting

COLUMNS = (
    "workload", "variant", "operators", "states", "peaks", "seconds", "states_per_minute", "overhead_at_80", "overhead_at_40",
    "least_share",
)  # fmt: skip
NOTES = (
    "overheads of first guesses, over the least time without a limit; shares of the peak of the captured graph in program order",
    "states: graphs that were judged; peaks: states at whose peaks sets were looked for; seconds of processor time, one thread",
)
VARIANTS = ("all", "L = 2", "L = 8", "no heat", "no filter", "no algebra", "no fission")


class _EverythingIsHot(Judge):
    """As if every tensor stood at the peak."""

    def of(self, graph: Graph, prices: Prices, parent: JudgedGraph | None = None) -> JudgedGraph:
        return _Hot(**vars(super().of(graph, prices, parent)))


class _Hot(JudgedGraph):
    def standing(self, limit: int) -> dict[Storage, int]:
        made = {value.storage for node in self.graph.nodes for value in node.results if not value.storage.kind.caller_owned}
        return {storage: storage.nbytes for storage in made if isinstance(storage.nbytes, int)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--workloads", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS, metavar="NAME")
    parser.add_argument("--states", type=int, default=SearchWidth().states)
    options = parser.parse_args()
    rows: list[Mapping[str, Cell]] = []
    for case in CASES:
        if case.name in options.workloads:
            graphs = _graphs(case, preset("rtx3090"))
            rows += [_row(case.name, variant, graphs, options.states) for variant in options.variants]
            table = Results("magis_outer", "The search over graphs, and what its parts are worth", COLUMNS, tuple(rows), NOTES)
            table.save()
    table.print()


def _graphs(case: Case, device: Device) -> list[Rewriting]:
    """The graphs that compute the same, with what algebra did to them."""
    made = case.published[0].build(case.batch_size, "meta")
    program = TrainingProgram(made.model, made.loss, plain_sgd(made.model), None, 1, None)
    plain = equal_graphs(capture_training(program, Given(tuple(made.batch), {}, torch.device("cpu")))[-1].graph)
    ruled = rewritings(plain[-1], lambda nodes, among: [device.node_us(node) for node in nodes], exact=False)
    return [*(Rewriting(graph, (), exact=True) for graph in plain), *ruled]


def _row(workload: str, variant: str, graphs: Sequence[Rewriting], states: int) -> Mapping[str, Cell]:
    device, begin = preset("rtx3090"), time.process_time()
    search = _search(variant, graphs, device, states)
    search.run()
    seconds, best = time.process_time() - begin, search.best
    limits = search.judge.limits
    fitting = limits[: int((best < float("inf")).sum())]

    def overhead(share: float) -> float | None:
        within = [us for limit, us in zip(limits, best, strict=True) if limit <= share * limits[0] and us < float("inf")]
        return float(min(within)) / float(best[0]) - 1 if within else None

    row: Mapping[str, Cell] = {
        "workload": workload, "variant": variant, "operators": len(graphs[0].graph.nodes), "states": len(search.states),
        "peaks": search.peaks, "seconds": seconds, "states_per_minute": 60 * len(search.states) / seconds,
        "overhead_at_80": overhead(0.8), "overhead_at_40": overhead(0.4), "least_share": float(fitting[-1]) / float(limits[0]),
    }  # fmt: skip
    print(row, flush=True)
    return row


def _search(variant: str, graphs: Sequence[Rewriting], device: Device, states: int) -> FissionSearch:
    outer = SearchWidth(states=states, nodes=10**9)
    given = [each for each in graphs if not (each.applied_rules and variant == "no algebra")]
    split = [] if variant == "no fission" else [prepared(each.graph) for each in worth_parting(given)]
    if variant.startswith("L = "):
        outer = replace(outer, levels=int(variant[4:]))
    if variant == "no filter":
        outer = replace(outer, sets=10**6)
    roots = [*(_root(each.graph, device, splits=False) for each in given), *(_root(graph, device, splits=True) for graph in split)]
    return FissionSearch(roots, (_EverythingIsHot if variant == "no heat" else Judge)(device.granule_bytes, device), outer)


def _root(graph: Graph, device: Device, *, splits: bool) -> Root:
    return Root(graph, Prices(graph, device.graph_us(graph), (0,) * len(graph.nodes), device), Loops(graph) if splits else None)


if __name__ == "__main__":
    main()
