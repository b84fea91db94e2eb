"""Loops: a node whose body runs once for each part of an extent, one part after the other (fission: MAGIS, section 4.2).

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
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from lowtide.errors import CheckError
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.operators.names import LOOP
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
        said = dict(node.kwargs)
        along, into, extent, part = (said.pop(name, None) for name in ("along", "into", "extent", "part"))
        if node.op != LOOP or node.body is None or said or len(node.body.dimensions) != 1:
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
    def made(self) -> Iterator[tuple[Value, Value, Into]]:
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
