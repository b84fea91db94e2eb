"""Parts that follow one another: where the result of each is read by the next alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lowtide.cpu.partition.algorithm import is_complex, split
from lowtide.cpu.partition.partition import CONSTANT, Partition
from lowtide.cpu.partition.reuse import Reuse, reuse_of
from lowtide.ir.graph import Node, Value


@dataclass(frozen=True, eq=False)
class Part:
    """What conventional fusion makes one kernel."""

    nodes: tuple[Node, ...]  # in program order

    @cached_property
    def complex(self) -> Node | None:
        """Its one complex operator; None where all are simple."""
        return next((node for node in self.nodes if is_complex(node)), None)

    @cached_property
    def given(self) -> Value | None:
        """What the complex operator reads that is no parameter, buffer or constant: the first of it."""
        return None if self.complex is None else next((value for value in self.complex.inputs if value.storage.kind not in CONSTANT), None)

    @cached_property
    def reuse(self) -> Reuse | None:
        """How the complex operator reads that; None where it is not known."""
        return None if self.complex is None or self.given is None else reuse_of(self.complex, self.given)

    @cached_property
    def makes(self) -> frozenset[Value]:
        return frozenset(value for node in self.nodes for value in node.results)


def parts_of(partition: Partition) -> tuple[tuple[Part, ...], ...]:
    """Split: the parts of each cluster, in an order in which they can run."""
    cluster_of = {node: at for at, nodes in enumerate(partition.clusters) for node in nodes}
    found: list[list[Part]] = [[] for _ in partition.clusters]
    for nodes in split(partition).clusters:
        found[cluster_of[nodes[0]]].append(Part(nodes))
    return tuple(map(tuple, found))


def chains_of(parts: Sequence[Part], partition: Partition) -> tuple[tuple[Part, ...], ...]:
    """The parts of one cluster as chains, each part in one, in order.

    A part goes on a chain where its complex operator reads the last value of the chain's end, and nothing else reads what that end makes
    but the part itself.
    """
    readers: dict[Value, set[Part | None]] = {}
    inside = {node: part for part in parts for node in part.nodes}
    for node in partition.graph.nodes:
        for value in node.inputs:
            readers.setdefault(value, set()).add(inside.get(node))
    for value in partition.graph.outputs:
        readers.setdefault(value, set()).add(None)
    chains: list[list[Part]] = []
    end_of: dict[Value, list[Part]] = {}
    for part in parts:
        chain = end_of.get(part.given) if part.given is not None else None
        if chain is None or any(readers.get(value, set()) - {part, chain[-1]} for value in chain[-1].makes):
            chain = []
            chains.append(chain)
        chain.append(part)
        end_of.update(dict.fromkeys(part.makes, chain))
    return tuple(map(tuple, chains))
