"""Little instances and random answers, right and wrong, for the judge's tests."""

from __future__ import annotations

import random
from typing import Any

Graph = dict[str, Any]
COPIES = ("store", "drop", "load")


def random_graph(rng: random.Random, count: int, *, copies: bool = False) -> Graph:
    """A graph of so many nodes: some make two tensors or none, some work in place, run once, or write over what others read."""
    sizes = [rng.randint(1, 9) for _ in range(rng.randint(1, 2))]
    graph: Graph = {name: [] for name in ("makes", "reads", "after", "takes", "workspace_bytes", "cost", "until", "once")}
    for node in range(count):
        reads = sorted(rng.sample(range(len(sizes)), min(len(sizes), rng.randint(1, 3))))
        alike = reads[0] if rng.random() < 0.4 else None
        made = list(range(len(sizes), len(sizes) + rng.choice((1, 1, 1, 2))))
        sizes += [rng.randint(1, 9) if alike is None or at else sizes[alike] for at in range(len(made))]
        before = rng.sample(range(node), min(node, rng.choice((0, 0, 0, 1))))
        graph["makes"].append(made)
        graph["reads"].append(reads)
        graph["after"].append(before)
        graph["takes"].append([] if alike is None else [alike])
        graph["workspace_bytes"].append(rng.choice((0, 0, 3)))
        graph["cost"].append(rng.randint(1, 9))
        graph["until"].append([])
        if rng.random() < 0.15:
            graph["once"].append(node)
        for other in before:
            if rng.random() < 0.5:
                graph["until"][other].append(node)
    made_by_nodes = {tensor for row in graph["makes"] for tensor in row}
    kept = sorted(rng.sample(sorted(made_by_nodes), min(2, len(made_by_nodes))))
    graph |= {"format": "yardstick.graph", "name": "random", "bytes": sizes, "kept": kept, "resident_bytes": rng.choice((0, 5))}
    if copies:
        graph["store"] = [rng.randint(1, 9) if rng.random() < 0.8 and tensor not in kept else None for tensor in range(len(sizes))]
        graph["load"] = [None if each is None else rng.randint(1, 9) for each in graph["store"]]
    return graph


def random_sequence(rng: random.Random, graph: Graph) -> list[Any]:
    """The nodes in order, with entries put in anywhere: most such sequences are wrong, and some are right."""
    sequence: list[Any] = list(range(len(graph["makes"])))
    for _ in range(rng.randint(0, 3)):
        node = rng.randrange(len(graph["makes"]))
        sequence.insert(rng.randint(sequence.index(node) + 1, len(sequence)), node)
    for _ in range(rng.randint(0, 2) if "store" in graph else 0):
        tensor = rng.randrange(len(graph["bytes"]))
        places = sorted(rng.randint(0, len(sequence)) for _ in COPIES)
        for place, kind in reversed(list(zip(places, COPIES, strict=True))):
            if kind != "load" or rng.random() < 0.8:
                sequence.insert(place, [kind, tensor])
    return sequence


def answer_of(graph: Graph, problem: str, sequence: list[Any], limit_bytes: int | None = 10**9) -> dict[str, Any]:
    """An answer as a file would hold it."""
    return {"instance": graph["name"], "problem": problem, "limit_bytes": limit_bytes, "sequence": sequence}
