"""Little instances and random answers, right and wrong, for the judge's tests; the least cost of such an instance, by explicit memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any

from yardstick.check import AnswerError, value_of

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


def is_valid(instance: dict[str, Any], answer: dict[str, Any]) -> bool:
    try:
        value_of(instance, answer)
    except AnswerError:
        return False
    return True


def peak_of(graph: Graph, sequence: list[Any]) -> int:
    """The least limit that the judge accepts, by halving: no function of the judge but its verdict."""
    low, high = -1, sum(graph["bytes"]) * (len(sequence) + 2) + sum(graph["workspace_bytes"]) + graph["resident_bytes"]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_valid(graph, answer_of(graph, "offload", sequence, middle)) else (middle, high)
    return high


def least_by_state(graph: Graph, limit_bytes: int, most_runs: int | None) -> float:
    """The least cost by Dijkstra's algorithm, where what is in memory is a set that tensors are put into and taken out of.

    With `most_runs`, nodes first run in the order of numbers and each at most so often.
    """
    given = frozenset(range(len(graph["bytes"]))) - {tensor for row in graph["makes"] for tensor in row}
    start = (tuple(0 for _ in graph["makes"]), given)
    heap: list[tuple[int, int, Any]] = [(0, 0, start)]
    best, tie = {start: 0}, 0
    while heap:
        cost, _, state = heappop(heap)
        runs, here = state
        if all(runs) and here.issuperset(graph["kept"]):
            return cost
        if cost > best[state]:
            continue
        for more, after in _steps(graph, runs, here, limit_bytes - graph["resident_bytes"], most_runs):
            if cost + more < best.get(after, 10**9):
                best[after], tie = cost + more, tie + 1
                heappush(heap, (cost + more, tie, after))
    return float("inf")


def _steps(graph: Graph, runs: tuple[int, ...], here: frozenset[int], room: int, most_runs: int | None) -> Iterator[tuple[int, Any]]:
    yield from ((0, (runs, here - {tensor})) for tensor in here)
    for node, times in enumerate(runs):
        if most_runs is not None and (times >= most_runs or (not times and not all(runs[:node]))):
            continue
        written = any(runs[other] for other in graph["until"][node])
        if (times and (node in graph["once"] or written)) or not here.issuperset(graph["reads"][node]):
            continue
        if not times and not all(runs[other] for other in graph["after"][node]):
            continue
        done = (*runs[:node], times + 1 if most_runs is not None else 1, *runs[node + 1 :])
        made = set(graph["makes"][node])
        need = sum(graph["bytes"][tensor] for tensor in here | made) + graph["workspace_bytes"][node]
        if need <= room:
            yield graph["cost"][node], (done, here | made)
        for tensor in graph["takes"][node]:  # that input ends as the node starts
            if need - graph["bytes"][tensor] <= room:
                yield graph["cost"][node], (done, here - {tensor} | made)
