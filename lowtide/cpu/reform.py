"""Divide and conquer (AGO, section V): clusters are split into parts, and parts joined where that is predicted or measured to win.

    parts   what conventional fusion makes one kernel: at most one complex operator, and the simple ones around it
    chain   parts of one cluster, each of which is all that reads the result of the one before
    group   parts that run as one kernel, and the scheme by which they do; a part alone has none

`choice.reform(partition, costs)` gives the groups of a graph in an order in which they can run. No torch, no measuring: `costs` knows.
Here are also the ways to run several complex operators as one kernel without repeated work (AGO, section III-B2), and where each is legal:

ROWS      row by row: a ring holds the rows that windows still need; between rows nothing is cut, so that no loop that reads an
          element again is. A thread repeats what the windows of its first row need of the thread before
CHANNELS  middle channels in tiles: each tile is made, goes through windows, and is added to all results; nothing is repeated

What repeats work: where an operator's result is computed again when the operator that reads it runs tile by tile (AGO, section III-B). A
tile of the downstream operator needs a tile of the upstream one. An element is needed by several tiles in two cases: along a loop of the
downstream operator that does not index it (the output channels of a convolution), or in windows that overlap (a kernel of more than one
position). Where neither is cut, nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from math import prod

from lowtide.cpu.partition import CONSTANT, Partition, is_complex, split
from lowtide.errors import there
from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.axes import Index, Nest
from lowtide.ir.operators.nodes import is_view, nest_of
from lowtide.ir.operators.shapes import ints
from lowtide.ir.sizes import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Window:
    """Positions of a loop that need overlapping parts of one dimension."""

    dim: int  # of the tensor that is read
    loop: str  # that moves the window
    step: int  # from one position to the next
    span: int  # elements from the first that a position needs to the last


@dataclass(frozen=True, slots=True)
class Reuse:
    """Along which loops of an operator the elements of one of its arguments are needed again."""

    again: tuple[str, ...]  # loops that do not index it
    windows: tuple[Window, ...]


def reuse_of(node: Node, value: Value) -> Reuse | None:
    """How `node` reads `value`; None where its loops are not known. Raises CheckError where a shape is symbolic."""
    nest = nest_of(node)
    access = nest.access(value)
    if access is None:
        return None
    used = {loop for index in access.dims for loop, _ in index}
    again = tuple(loop.name for loop in nest.loops if not loop.reduces and loop.extent > 1 and loop.name not in used)
    windows = (_window(nest, dim, index) for dim, index in enumerate(access.dims))
    return Reuse(again, tuple(window for window in windows if window is not None))


def _window(nest: Nest, dim: int, index: Index) -> Window | None:
    """The window along a dimension; None where positions do not overlap."""
    moving = [(name, step) for name, step in index if not nest.loop(name).reduces]
    inner = [(name, step) for name, step in index if nest.loop(name).reduces and nest.loop(name).extent > 1]
    span = 1 + sum((nest.loop(name).extent - 1) * step for name, step in inner)
    if len(moving) != 1 or not inner or span <= moving[0][1] or nest.loop(moving[0][0]).extent == 1:
        return None
    return Window(dim, *moving[0], span)


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
    parts: list[list[Part]] = [[] for _ in partition.clusters]
    for nodes in split(partition).clusters:
        parts[cluster_of[nodes[0]]].append(Part(nodes))
    return tuple(map(tuple, parts))


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


_LANES = 16  # channels of a tile: one vector of the widest kind


class Scheme(Enum):
    """How the operators of a group share a kernel."""

    ROWS = "rows through a ring"
    CHANNELS = "channels in tiles"


@dataclass(frozen=True, slots=True)
class KernelShape:
    """What a scheme holds and repeats."""

    scheme: Scheme
    ring_bytes: int  # of what is between the operators, for one thread
    repeated: float  # times that the first operators' work is done, 1.0 being once
    rows: int  # passes over the weights, for one thread
    passes: int  # over what goes in and what comes out: 1, or the tiles


def schemes_of(parts: Sequence[Part], threads: int = 1) -> tuple[KernelShape, ...]:
    """The schemes by which a run of parts of one chain can be one kernel. Raises CheckError where a shape is symbolic."""
    if len(parts) < 2 or any(part.complex is None or part.reuse is None for part in parts) or not _straight(parts):
        return ()
    return tuple(shape for shape in (_by_rows(parts, threads), _by_channels(parts)) if shape is not None)


def _straight(parts: Sequence[Part]) -> bool:
    """Whether all that is between the operators keeps the shape of their images, element by element."""
    for part, following in pairwise(parts):
        result, given = _made(part), following.given
        if result is None or given is None or ints(part.nodes[0], result) != ints(part.nodes[0], given):
            return False
        if any(is_view(node) for node in part.nodes if node is not part.complex):
            return False
    return True


def _made(part: Part) -> Value | None:
    return None if part.complex is None else part.complex.outputs[0]


def _by_rows(parts: Sequence[Part], threads: int) -> KernelShape | None:
    """Rows of the last result. Operators over images, one window at a time; products have rows that need one row each."""
    loops = [_row_loop(_nest(part)) for part in parts]
    if any(loop is None for loop in loops):
        return None
    rows = _nest(parts[-1]).loop(loops[-1] or "").extent
    ring, repeated = 0, 0.0
    for part, following, loop in zip(parts, parts[1:], loops[1:], strict=False):
        result_shape = there(_made(part))
        window = next((each for each in there(following.reuse).windows if each.loop == loop), None)
        span = window.span if window is not None else 1
        shape = ints(part.nodes[0], result_shape)
        total = shape[2] if len(shape) == 4 else shape[0]
        ring += prod(shape) // max(1, total) * min(span, total) * ITEM_BYTES[result_shape.dtype]
        if window is not None and threads > 1:
            repeated += (threads - 1) * (window.span - window.step) / max(1, total)
    return KernelShape(Scheme.ROWS, ring, 1.0 + repeated, -(-rows // threads), 1)


def _by_channels(parts: Sequence[Part]) -> KernelShape | None:
    """Two products with windows between them at most: each tile of middle channels is all that a tile of the next needs."""
    first, *middle, last = [part.complex for part in parts]
    if (
        first is None
        or last is None
        or not (_is_product(first) and _is_product(last))
        or not all(each and _is_depthwise(each) for each in middle)
    ):
        return None
    results = [value for value in map(_made, parts[:-1]) if value is not None]
    channels = ints(first, results[0])[1]
    if any(ints(first, value)[1] != channels for value in results):
        return None
    tiles = -(-channels // _LANES)
    channel_bytes = sum(prod(ints(first, value)) * ITEM_BYTES[value.dtype] for value in results)
    return KernelShape(Scheme.CHANNELS, channel_bytes // tiles, 1.0, 1, tiles)


def _nest(part: Part) -> Nest:
    return nest_of(there(part.complex))


def _row_loop(nest: Nest) -> str | None:
    """The loop over rows: of an image's height, of a matrix."""
    names = [loop.name for loop in nest.loops]
    batch = next((loop.extent for loop in nest.loops if loop.name in ("n", "b") and "m" not in names), 1)
    return "y0" if "y0" in names and batch == 1 else "m" if "m" in names and "b" not in names else None


def _is_product(node: Node) -> bool:
    """Whether each result is a sum over channels at one position."""
    nest = nest_of(node)
    names = {loop.name for loop in nest.loops}
    window = [loop.extent for loop in nest.loops if loop.name.startswith("r")]
    return "g" not in names and (names >= {"m", "k", "n"} or ("o" in names and all(extent == 1 for extent in window)))


def _is_depthwise(node: Node) -> bool:
    nest = nest_of(node)
    extents = {loop.name: loop.extent for loop in nest.loops}
    return "g" in extents and extents["i"] == 1 and extents["o"] == 1
