"""A small network with its backward pass, as a graph, and what is asked about it."""

from __future__ import annotations

from lowtide.ir.graph import Graph, Kind, Storage
from lowtide.plan.plan import Provenance
from lowtide.planning.request import Request
from lowtide.remat.sweep import Sweep
from tests.graphs import array, compute

PROVENANCE = Provenance(lowtide="0", torch="0", device="cpu", python="3", threads=1)
REQUEST = Request(PROVENANCE, sweeps=(Sweep(levels=8, max_states=300),))


def network(layers: int = 8, nbytes: int = 64) -> Graph:
    """So many layers of which each keeps what it makes for its gradient; every other result is the larger."""
    x = array(Storage("x", nbytes, "cpu", Kind.INPUT))
    made, nodes = [x], []
    for layer in range(layers):
        nodes.append(compute(f"a{layer}", made[-1], nbytes=nbytes * (1 + layer % 2)))
        made.append(nodes[-1].results[0])
    gradient = made[-1]
    for layer in reversed(range(layers)):
        nodes.append(compute(f"g{layer}", gradient, made[layer], nbytes=nbytes))
        gradient = nodes[-1].results[0]
    return Graph((x,), tuple(nodes), (gradient,))
