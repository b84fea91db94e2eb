"""Bytes of RAM against multiplications done again, beside what msf-CNN publishes (NeurIPS 2025), on the same chains in int8.

    python -m bench.edge_cuts

The image stays with the caller, as msf-CNN counts. Its networks have no residual additions; the same with them are beside. Each plan is
run in exactly its bytes, and its result compared with onnxruntime's. A second table has the networks with additions in two memories, of
which the fast one is small: the time by the model where nothing is cut, and where cuts, order, places and moves are one search.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnxruntime

import lowtide
from bench.edge_networks import mcunet_imagenet, mcunet_vww, mobilenet_v2
from bench.results import Cell, Results
from lowtide.edge.graph import EdgeGraph
from lowtide.edge.interpret import interpret
from lowtide.edge.onnx import network_of
from lowtide.edge.plan import EdgePlan, Space

Point = tuple[float, int]  # multiplications, of those where nothing is cut; bytes

# msf-CNN's points: the first without cuts.
NETWORKS: tuple[tuple[Callable[..., Any], tuple[Point, ...]], ...] = (
    (
        mobilenet_v2,
        ((1.0, 194_400), (1.0, 181_440), (1.019, 83_133), (1.097, 67_996), (1.253, 25_803), (1.382, 15_199)),
    ),
    (mcunet_vww, ((1.0, 96_000), (1.023, 45_283), (1.113, 26_240))),
    (mcunet_imagenet, ((1.0, 309_760), (1.041, 217_891), (1.455, 94_224))),
)
COLUMNS = (
    "network", "operators", "multiplications at most", "msf-CNN bytes", "bytes", "bound bytes", "multiplications", "cuts", "seconds",
    "run like onnxruntime", "with additions bytes", "with additions bound bytes", "with additions multiplications",
)  # fmt: skip


def rows_of_network(make: Callable[..., Any], points: Sequence[Point]) -> list[dict[str, Cell]]:
    """One row a point of msf-CNN's: the least bytes with as many multiplications."""
    chain, whole = make(), make(add=True)
    rows = []
    for at, (factor, theirs) in enumerate(points):
        began = time.process_time()
        plan = _plan(network_of(chain), factor, cut=at > 0)
        seconds, other = time.process_time() - began, _plan(network_of(whole), factor, cut=at > 0)
        rows.append(
            {
                "network": chain.graph.name, "operators": len(chain.graph.node), "multiplications at most": factor,
                "msf-CNN bytes": theirs, "bytes": plan.arena_bytes[0], "bound bytes": plan.bound,
                "multiplications": 1 + plan.extra_macs, "cuts": len(plan.cuts), "seconds": seconds,
                "run like onnxruntime": "yes" if _is_right(chain, plan) and _is_right(whole, other) else "no",
                "with additions bytes": other.arena_bytes[0], "with additions bound bytes": other.bound,
                "with additions multiplications": 1 + other.extra_macs,
            }
        )  # fmt: skip
    return rows


TWO_COLUMNS = (
    "network", "operators", "fast bytes", "whole us", "gap of it", "seconds of it", "us", "gap", "cuts", "moves", "multiplications",
    "seconds", "run like onnxruntime",
)  # fmt: skip


def rows_in_two(make: Callable[..., Any]) -> list[dict[str, Cell]]:
    """One row a size of the fast memory, 2 GB/s beside 0.2, with a DMA and 4 billion multiplications a second."""
    model, rows = make(add=True), []
    graph = network_of(model)
    for fast_bytes in (8 * 1024, 32 * 1024, 128 * 1024):
        spaces = (Space("fast", fast_bytes, 2e9, 2e9), Space("slow", None, 2e8, 2e8))
        plans, seconds = [], []
        for cut in (False, True):
            began = time.process_time()
            options = {"cut": True, "extra_macs": None} if cut else {}
            plans.append(lowtide.plan_edge(graph, spaces, dma=True, macs_per_s=4e9, inputs_outside=True, **options))
            seconds.append(time.process_time() - began)
        whole, plan = plans
        rows.append(
            {
                "network": model.graph.name, "operators": len(graph.nodes), "fast bytes": fast_bytes, "whole us": whole.time_us,
                "gap of it": whole.gap, "seconds of it": seconds[0], "us": plan.time_us, "gap": plan.gap, "cuts": len(plan.cuts),
                "moves": len(plan.moves), "multiplications": 1 + plan.extra_macs, "seconds": seconds[1],
                "run like onnxruntime": "yes" if _is_right(model, plan) else "no",
            }
        )  # fmt: skip
    return rows


def _plan(graph: EdgeGraph, factor: float, *, cut: bool) -> EdgePlan:
    return lowtide.plan_edge(graph, [Space("ram")], cut=cut, extra_macs=factor - 1, inputs_outside=True)


def _is_right(model: Any, plan: EdgePlan) -> bool:
    """Whether the plan, run in its bytes, gives onnxruntime's integers."""
    shape = plan.graph.tensors[plan.graph.inputs[0]].shape
    image = np.random.default_rng(0).integers(-100, 100, shape).astype(np.int8)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"x": image})
    (result,) = interpret(plan, [image]).values()
    return np.array_equal(result, expected)


def main() -> None:
    rows = tuple(row for make, points in NETWORKS for row in rows_of_network(make, points))
    table = Results("edge_cuts", "Cuts: bytes of RAM, int8, beside msf-CNN", COLUMNS, rows, ("No device was measured.",))
    table.print()
    table.save()
    two = tuple(row for make, _ in NETWORKS for row in rows_in_two(make))
    table = Results("edge_cuts_two", "Cuts in two memories: time by the model", TWO_COLUMNS, two, ("No device was measured.",))
    table.print()
    table.save()


if __name__ == "__main__":
    main()
