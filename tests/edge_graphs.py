"""Small networks for tests of `lowtide.edge`: random ones, and chains."""

from __future__ import annotations

import random

from lowtide.edge.graph import EdgeGraph, EdgeNode, EdgeTensor
from lowtide.edge.plan import Space


def random_graph(seed: int, most_nodes: int = 6, largest_bytes: int = 6, weights: float = 0.2) -> EdgeGraph:
    """A network of up to `most_nodes` operators: branches, views, results in place, workspaces, constants, unread results."""
    rng = random.Random(seed)
    tensors: list[EdgeTensor] = []

    def tensor(nbytes: int, *, constant: bool = False) -> int:
        tensors.append(EdgeTensor(f"t{len(tensors)}", (nbytes,), "int8", nbytes, constant))
        return len(tensors) - 1

    inputs = tuple(tensor(rng.randint(1, largest_bytes)) for _ in range(rng.choice((1, 1, 2))))
    there, nodes = list(inputs), []
    for index in range(rng.randint(2, most_nodes)):
        read = rng.sample(there[-3:], min(len(there[-3:]), rng.choice((1, 1, 2))))
        source, kind = read[0], rng.random()
        if kind < 0.15:
            made, views, in_place = (tensor(tensors[source].size_bytes),), ((0, 0),), ()
        elif kind < 0.5:
            made, views, in_place = (tensor(tensors[source].size_bytes),), (), ((0, 0),)
        else:
            made, views, in_place = tuple(tensor(rng.randint(1, largest_bytes)) for _ in range(rng.choice((1, 1, 1, 2)))), (), ()
        if rng.random() < weights:
            read.append(tensor(rng.randint(1, 9), constant=True))
        workspace = 0 if views or rng.random() < 0.8 else rng.randint(1, 3)
        nodes.append(
            EdgeNode(
                f"n{index}", "Op", "", tuple(read), made, macs=rng.randint(0, 30), workspace_bytes=workspace, views=views, in_place=in_place
            )
        )
        there += made
    read_ids = {each for node in nodes for each in node.inputs}
    outputs = tuple(each for each in there if each not in read_ids and each not in inputs and rng.random() < 0.7) or (there[-1],)
    return EdgeGraph(f"random {seed}", tuple(tensors), tuple(nodes), inputs, outputs)


def random_spaces(seed: int, count: int) -> tuple[Space, ...]:
    """The fastest and smallest first."""
    rng = random.Random(seed)
    rates = sorted((rng.choice((1.0, 2.0, 4.0, 10.0)) for _ in range(count)), reverse=True)
    sizes = [rng.randint(3, 10) for _ in range(count - 1)] + [rng.choice((8, 12, 100))]
    return tuple(
        Space(f"m{index}", size, rate, rate / rng.choice((1, 2))) for index, (size, rate) in enumerate(zip(sizes, rates, strict=True))
    )


def chain(sizes: list[int], macs: int = 0) -> EdgeGraph:
    """Each operator reads what the one before it made."""
    tensors = tuple(EdgeTensor(f"t{index}", (size,), "int8", size) for index, size in enumerate(sizes))
    nodes = tuple(EdgeNode(f"n{index}", "Op", "", (index,), (index + 1,), macs=macs) for index in range(len(sizes) - 1))
    return EdgeGraph("chain", tensors, nodes, (0,), (len(sizes) - 1,))
