"""Before sizes are known: in which ways each tensor can be made again by the time that it is read.

takes   a graph over dimensions and an order of its nodes
leaves  for each tensor that a node makes, and for each node that reads it, the subgraphs that would make it again before that node and
        whose symbolic impact is positive over the whole range

What is read after that node anyway does not count against a subgraph that reads it. A subgraph can only be used until one of the nodes runs
that write over what it reads of the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lowtide.cost.memory import counted_storages
from lowtide.cost.symbolic import SymbolicProblem, symbolic_problem
from lowtide.ir.graph import Graph, Node, Storage
from lowtide.ir.operators.nodes import is_view, repeatable
from lowtide.remat.problem import handed_over
from research.orders.symbolic import symbolic_ready_list
from research.recompute import Recomputation, Search


@dataclass(frozen=True)
class Regeneration:
    """A way to make a tensor again."""

    nodes: tuple[int, ...]  # in the order in which they run; the last makes the tensor
    reads: tuple[int, ...]  # tensors that have to be there: what the nodes read and do not make, without the caller's
    until: int  # position in the order: it can be used before the node there runs, and not later


@dataclass(frozen=True, eq=False)
class Compiled:
    """A program with its branches: what is known of it before its sizes are."""

    graph: Graph
    problem: SymbolicProblem  # of ordering, without workspaces
    order: tuple[int, ...]  # nodes, without those that only make views
    regenerations: Mapping[tuple[int, int], tuple[Regeneration, ...]]  # by tensor and by which of its uses, 0 for the first

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """By tensor: the positions in the order at which a node reads it, ascending."""
        positions: list[list[int]] = [[] for _ in self.problem.tensor_bytes]
        reads = self.problem.structure.reads
        for position, index in enumerate(self.order):
            for tensor in reads.ids[reads.ptr[index] : reads.ptr[index + 1]]:
                positions[tensor].append(position)
        return tuple(map(tuple, positions))


def compiled(graph: Graph, order: Sequence[int] | None = None, *, most_nodes: int = 40) -> Compiled:
    """All ways in which tensors can be made again by at most so many nodes; in the paper's own order (section 2.2) where none is given."""
    problem = symbolic_problem(graph)
    steps = symbolic_ready_list(problem) if order is None else order
    program = Compiled(graph, problem, tuple(index for index in steps if not is_view(graph.nodes[index])), {})
    return replace(program, regenerations=dict(_Branches(program, most_nodes).all()))


@dataclass(frozen=True)
class _Living:
    """The storages that live up to a position in any case."""

    last: Mapping[Storage, int]  # by storage: the position that reads it last
    position: int

    def __contains__(self, storage: object) -> bool:
        return isinstance(storage, Storage) and self.last.get(storage, -1) >= self.position


class _Branches:
    """The search for one program."""

    def __init__(self, program: Compiled, most_nodes: int) -> None:
        graph, order = program.graph, program.order
        self.graph, self.most_nodes, self.search = graph, most_nodes, Search(graph)
        self.uses = dict(zip(counted_storages(graph), program.uses, strict=True))
        self.number = {storage: tensor for tensor, storage in enumerate(self.uses)}
        self.position = {graph.nodes[index]: position for position, index in enumerate(order)}
        self.index = {node: index for index, node in enumerate(graph.nodes)}
        self.once = handed_over(graph)
        self.writers = {(before.storage, before.version): node for node in graph.nodes for before, _ in node.writes}
        self.end = len(order)

    def all(self) -> Iterator[tuple[tuple[int, int], tuple[Regeneration, ...]]]:
        """By tensor and use; without those that cannot be."""
        last = {storage: positions[-1] for storage, positions in self.uses.items() if positions}
        last |= dict.fromkeys((value.storage for value in self.graph.outputs), self.end)
        for storage, positions in self.uses.items():
            for use, position in enumerate(positions):
                subgraphs = self.search.worthwhile(storage, _Living(last, position), self.most_nodes)
                if subgraphs:
                    yield (self.number[storage], use), tuple(map(self.regeneration, subgraphs))

    def regeneration(self, recomputation: Recomputation) -> Regeneration:
        """A subgraph by numbers."""
        nodes = sorted(recomputation.nodes, key=self.position.__getitem__)
        until = min((self.limit(node) for node in nodes), default=self.end)
        return Regeneration(tuple(map(self.index.__getitem__, nodes)), tuple(self.number[each] for each in recomputation.reads), until)

    def limit(self, node: Node) -> int:
        """The position of the first node that writes over what a repetition of `node` reads; the end where none does.

        Its own position for what is made once.
        """
        if node in self.once:
            return self.position[node]
        again = repeatable(node)
        assert again is not None  # nothing else is in a subgraph
        written = [self.writers.get((value.storage, value.version)) for value in again.inputs]
        return min((self.position[writer] for writer in written if writer is not None and writer is not node), default=self.end)
