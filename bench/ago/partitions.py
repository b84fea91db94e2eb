"""How balanced partitions are: what AGO's figure 14 tells of MobileViT, of all networks.

    python -m bench.ago.partitions

Beside AGO's Algorithm 1 over operators, and over units, each a complex operator with the simple ones around it, stands a rule like
Relay's. There an operator and the element-wise ones that follow it one by one are a subgraph, at most one of them complex; what changes
shapes ends one.
"""

from __future__ import annotations

import time

import torch

from bench.ago.balance import Balance, cluster_weights, histogram, of_clusters
from bench.ago.networks import other_cases, paper_cases
from bench.results import Cell, Results
from lowtide.capture.program import capture_inference
from lowtide.capture.trace import Given
from lowtide.ir.graph import Graph, Node
from lowtide.ir.operators.nodes import row_of
from lowtide.ir.operators.row import Fusion
from lowtide.ir.shapes.dimension import FIXED
from research.fusion.clusters import PAPERS_WEIGHT, Partition, constant_nodes, partition, partition_of_operators

COLUMNS = ("network", "rule", "operators", "clusters", "mean", "median", "jain", "trivial", "bins", "seconds")
_NORM = "aten.native_batch_norm"
_RULES = {
    "AGO": lambda graph: partition_of_operators(graph, PAPERS_WEIGHT),
    "units": lambda graph: partition(graph, PAPERS_WEIGHT),
    "like Relay": lambda graph: like_relay(graph),
}


def like_relay(graph: Graph) -> Partition:
    """The baseline."""
    constants = constant_nodes(graph)
    readers: dict[object, list[Node]] = {}
    for node in graph.nodes:
        for value in node.inputs:
            readers.setdefault(value, []).append(node)
    clusters: list[list[Node]] = []
    of: dict[Node, list[Node]] = {}
    makers = {value: node for node in graph.nodes for value in node.results}
    for node in graph.nodes:
        if node in constants:
            continue
        before = [makers[value] for value in node.inputs if value in makers and makers[value] not in constants]
        follows = row_of(node.op).fusion is Fusion.ELEMENTWISE or node.op.startswith(_NORM)
        last = max(before, key=graph.nodes.index, default=None) if follows else None
        alone = last is not None and all(readers.get(value, [node]) == [node] for value in last.results) and of[last][-1] is last
        if last is not None and alone and (row_of(of[last][0].op).fusion is Fusion.ELEMENTWISE or not _moves(of[last][0])):
            of[last].append(node)
            of[node] = of[last]
        else:
            of[node] = [node]
            clusters.append(of[node])
    return of_clusters(graph, clusters)


def _moves(node: Node) -> bool:
    """Whether an operator changes shapes."""
    return node.op.split(".")[1] in ("view", "_unsafe_view", "permute", "transpose", "t", "clone", "cat", "split", "unbind", "slice")


def main() -> None:
    rows: list[dict[str, Cell]] = []
    for case in (*paper_cases(), *other_cases()):
        if case.name.endswith((" 56", " 112")):
            continue
        model, args = case.built()
        graph = capture_inference(model, Given(args, {}, torch.device("cpu"), FIXED)).graph
        for rule, find in _RULES.items():
            start = time.process_time()
            parts = find(graph)
            seconds = time.process_time() - start
            weights = cluster_weights(parts)
            its = Balance.of(weights)
            bins = " ".join(str(count) for *_, count in histogram(weights))
            figures = {"clusters": its.count, "mean": its.mean, "median": its.median, "jain": its.jain, "trivial": its.trivial}
            rows.append({"network": case.name, "rule": rule, "operators": len(graph.nodes), **figures, "bins": bins, "seconds": seconds})
    notes = ("weights: 0.1 an extent, 1 a loop; ten bins of equal width by logarithm from 1 to 10,000; seconds of processor time",)
    found = Results("ago_partitions", "Partitions", COLUMNS, tuple(rows), notes)
    found.save()
    found.print()


if __name__ == "__main__":
    main()
