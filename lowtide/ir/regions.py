"""Regions: a node whose body is compiled, and run as one (AGO).

    out = fuse.region(x, w1, w2, .., fixed=(1, 2, ..), arena_bytes=.., packed_bytes=.., joined=(1, 0, ..))
        def body(x, w1, w2, ..):  # as torch would compute it
            ..

What is `fixed` are constants: the positions of arguments that are prepared once, and again where they have changed. Nothing that the body
makes but its results exists outside; the arena, and the constants as kernels read them, are its workspace, and stay.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.errors import CheckError
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.operators.names import REGION

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
        said = dict(node.kwargs)
        fixed, arena_bytes, packed_bytes = (said.pop(name, None) for name in ("fixed", "arena_bytes", "packed_bytes"))
        by, joined = said.pop("by", ""), said.pop("joined", ())
        ints = [each for each in fixed if isinstance(each, int)] if isinstance(fixed, tuple) else None
        numbers = [each for each in joined if isinstance(each, int)] if isinstance(joined, tuple) else None
        if (
            node.op != REGION
            or node.body is None
            or said
            or by not in ("", INDUCTOR)
            or ints is None
            or numbers is None
            or not isinstance(arena_bytes, int)
            or not isinstance(packed_bytes, int)
        ):
            raise CheckError(f"{node.op}: expected a region with a body, fixed=, arena_bytes= and packed_bytes=, got another node")
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


def is_by_inductor(node: Node) -> bool:
    return node.op == REGION and ("by", INDUCTOR) in node.kwargs
