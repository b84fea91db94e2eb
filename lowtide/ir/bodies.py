"""Nodes that own a body, a graph of their own: loops, which run it once for each part of an extent, and regions, which run it as one.

Loops: a node whose body runs once for each part of an extent, one part after the other (fission: MAGIS, section 4.2).

    total, rows = fission.loop(x, w, along=(0, None), into=("sum", 0), extent=512, part=64)
        def body(  # part in 1..64
            x,  # float32[part, 32] ... argument cpu      the part of x that it is given
            w,  # all of w
            total,  # where its results go: the whole of what is summed up ...
            rows,  # ... and the part of rows
        ):

`along` says for each argument the dimension that is cut, None where each part is given all of it; `into` for each result the dimension
along which the parts lie in it, or how they are put together. A dimension may be longer than the extent by a whole factor, as where batch
and tokens are one: a part is then as many times as long. The last part may be smaller, so that sizes within the body are expressions over
its one dimension.

Seen from outside it is a node: arguments, results, a workspace, a time. Within, all that it is given and all results are the caller's: the
body is a graph in normal form that writes each of its results, and each argument that the loop writes, by nodes that say so. A loop may
write a storage several times, so that it leaves a version that is more than one further.

Regions: a node whose body is compiled, and run as one (AGO).

    out = fuse.region(x, w1, w2, .., fixed=(1, 2, ..), arena_bytes=.., packed_bytes=.., joined=(1, 0, ..))
        def body(x, w1, w2, ..):  # as torch would compute it
            ..

What is `fixed` are constants: the positions of arguments that are prepared once, and again where they have changed. Nothing that the body
makes but its results exists outside; the arena, and the constants as kernels read them, are its workspace, and stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from lowtide.errors import CheckError
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.operators.row import LOOP, REGION
from lowtide.ir.shapes.points import at
from lowtide.ir.sizes import Size

Into: TypeAlias = "int | str"  # the dimension that parts lie along, or how they are put together

# How results are put together, and what they begin as: what changes nothing.
NEUTRAL = {"sum": 0.0, "max": float("-inf"), "min": float("inf"), "product": 1.0, "any": 0.0, "all": 1.0, "same": 0.0}


@dataclass(frozen=True, slots=True)
class Loop:
    """What a node of `fission.loop` says."""

    node: Node
    body: Graph
    extent: Size
    part: int  # of the extent, but for the last one, which may be smaller
    along: tuple[int | None, ...]  # by argument
    into: tuple[Into, ...]  # by result

    @classmethod
    def of(cls, node: Node) -> Loop:
        """Raises CheckError for a node that does not have the form of one."""
        options = dict(node.kwargs)
        along, into, extent, part = (options.pop(name, None) for name in ("along", "into", "extent", "part"))
        if node.op != LOOP or node.body is None or options or len(node.body.dimensions) != 1:
            raise CheckError(
                f"{node.op}: expected a loop with a body over one dimension, along=, into=, extent= and part=, got another node"
            )
        if not isinstance(part, int) or not isinstance(along, tuple) or not isinstance(into, tuple) or extent is None:
            raise CheckError(
                f"{node.op}: expected along and into as tuples, extent as a size and part as a number, got {dict(node.kwargs)}"
            )
        return cls(node, node.body, extent, part, along, into)

    @property
    def cut(self) -> Iterator[tuple[Value, Value, int | None]]:
        """The arguments, what the body calls them, and the dimension that is cut."""
        return ((value, part, dim) for value, part, dim in zip(self._values, self.body.inputs, self.along, strict=False))

    @property
    def results(self) -> Iterator[tuple[Value, Value, Into]]:
        """The results, what the body calls them, and how they come about."""
        results = (value for value in self.node.outputs if value is not None)
        return zip(results, self.body.inputs[len(self.along) :], self.into, strict=True)

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """The sizes of parts, and how many are of each. Raises CheckError where the extent is symbolic."""
        if not isinstance(self.extent, int):
            raise CheckError(f"{self.node.op}: expected an extent, got {self.extent}: give its dimensions values first")
        whole, rest = divmod(self.extent, self.part)
        return tuple((size, count) for size, count in ((self.part, whole), (rest, 1)) if size and count)

    def at(self, size: int) -> Graph:
        """The body for a part of that size. Raises ShapeError for one that no part has."""
        return at(self.body, {self.body.dimensions[0].name: size})

    def at_any(self, size: int) -> Graph:
        """The body as it would be for a part of any size."""
        dimension = replace(self.body.dimensions[0], most=size)
        return at(replace(self.body, dimensions=(dimension,)), {dimension.name: size})

    @property
    def _values(self) -> tuple[Value, ...]:
        return tuple(arg for arg in self.node.args if isinstance(arg, Value))


def is_loop(node: Node) -> bool:
    return node.op == LOOP


INDUCTOR = "inductor"


@dataclass(frozen=True, slots=True)
class Region:
    """What a node of `fuse.region` says."""

    node: Node
    body: Graph
    fixed: tuple[int, ...]
    arena_bytes: int
    packed_bytes: int
    joined: tuple[int, ...] = ()  # which of its operators share kernels: by window with blocks around it, the number of one, or 0
    by: str = ""  # the compiler, where that is not lowtide's own generator

    @classmethod
    def of(cls, node: Node) -> Region:
        """Raises CheckError for a node that does not have the form of one."""
        options = dict(node.kwargs)
        fixed, arena_bytes, packed_bytes = (options.pop(name, None) for name in ("fixed", "arena_bytes", "packed_bytes"))
        by, joined = options.pop("by", ""), options.pop("joined", ())
        is_one = node.op == REGION and not options and by in ("", INDUCTOR) and isinstance(fixed, tuple) and isinstance(joined, tuple)
        if not is_one or node.body is None or not isinstance(arena_bytes, int) or not isinstance(packed_bytes, int):
            raise CheckError(f"{node.op}: expected a region with a body, fixed=, arena_bytes= and packed_bytes=, got another node")
        ints, numbers = ([each for each in given if isinstance(each, int)] for given in (fixed, joined) if isinstance(given, tuple))
        if any(not 0 <= each < len(node.args) for each in ints) or arena_bytes < 0 or packed_bytes < 0:
            raise CheckError(f"{node.op}: expected positions of arguments and numbers of bytes, got {dict(node.kwargs)}")
        return cls(node, node.body, tuple(ints), arena_bytes, packed_bytes, tuple(numbers), str(by))

    @property
    def name(self) -> str:
        """What it is called by: its body's first result, or the last that it writes."""
        return self.body.outputs[0].name if self.body.outputs else [after.name for node in self.body.nodes for _, after in node.writes][-1]

    @property
    def workspace_bytes(self) -> int:
        """What it takes beside arguments and results, and holds from call to call: the arena, and the constants as kernels read them."""
        return self.arena_bytes + self.packed_bytes

    @property
    def constants(self) -> tuple[Value, ...]:
        return tuple(self.body.inputs[at] for at in self.fixed)


def is_region(node: Node) -> bool:
    return node.op == REGION


def run_nodes(graph: Graph) -> Iterator[Node]:
    """All nodes that torch runs one by one: those within loops, but not within regions, which are compiled."""
    for node in graph.nodes:
        yield node
        if node.body is not None and not is_region(node):
            yield from run_nodes(node.body)


def is_by_inductor(node: Node) -> bool:
    return node.op == REGION and ("by", INDUCTOR) in node.kwargs
