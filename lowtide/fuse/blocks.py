"""Which stages run as one, row by row (AGO, sections III-B2 and V): stages into stages, of which some are blocks.

    takes   stages in an order that is right, and the body that they compute
    leaves  the same work; what is between the parts of a block is in no buffer

A block is legal where a window slides over what a product or a convolution makes, or a product reads what a window makes, nothing else
reads what is between, and a row's ring is small enough for a thread's stack. Whether it wins is said by `reform` for convolutions, and for
pooling by what is between: more than a core's own cache holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import Enum

from lowtide.fuse.cluster.algorithm import is_complex, partition
from lowtide.fuse.layout import Buffer, stepped
from lowtide.fuse.reform.chains import Part
from lowtide.fuse.reform.join import reform
from lowtide.fuse.reform.schemes import Scheme
from lowtide.fuse.stages import Block, Convolution, Product, Stage, Windows
from lowtide.fuse.tune.machine import machine_of
from lowtide.fuse.tune.model import Model
from lowtide.fuse.tune.store import Measured, Store
from lowtide.ir.graph import Arg, Graph, Kind, Node, Storage, Value

_MOST_BYTES = 384 * 1024  # of a thread's stack
_NEAR_BYTES = 256 * 1024  # of what is between, that a core's own cache holds beside all else
_MACHINE = machine_of(100e3, 8e3)  # its caches; of its rates only their ratios matter
_KINDS = ("Weighted", "Largest")


class Joins(Enum):
    """Which blocks are made."""

    BEST = "those that win"
    ALL = "all that are legal"  # AGO's ablation NR
    NONE = "none"  # AGO's ablation NI


def with_blocks(stages: Sequence[Stage], body: Graph, fixed: Collection[Value], joins: Joins = Joins.BEST) -> tuple[Stage, ...]:
    """Stages with blocks in the place of their last parts"""
    if joins is Joins.NONE:
        return tuple(stages)
    readers = Counter(lay.buffer for stage in stages for lay in stage.reads)
    groups = _groups(body, fixed) if joins is Joins.BEST else None
    found: dict[Stage, Block] = {}  # by the last part
    taken: set[Stage] = set()
    makers = {stage.out.buffer: stage for stage in stages}
    users = {lay.buffer: stage for stage in stages for lay in stage.reads}
    for stage in stages:
        if isinstance(stage, Windows) and stage.kind in _KINDS and stage not in taken:
            block = _best(_blocks(stage, makers, users, readers), groups, taken)
            if block is not None:
                found[block.parts[-1]] = block
                taken.update(block.parts)
    return tuple(found.get(stage, stage) for stage in stages if stage not in taken or stage in found)


def _blocks(windows: Windows, makers: dict[Buffer, Stage], users: dict[Buffer, Stage], readers: Counter[Buffer]) -> list[Block]:
    """The blocks around a window, the largest first."""
    before, after = makers.get(windows.a.buffer), users.get(windows.out.buffer)
    first = before if isinstance(before, (Product, Convolution)) and _leads(before, windows, readers) else None
    last = after if isinstance(after, Product) and _follows(after, windows, readers) else None
    both = [Block(first, windows, last)] if first is not None and last is not None else []
    one = [Block(first, windows, None)] if first is not None else []
    two = [Block(None, windows, last)] if last is not None else []
    return [each for each in (*both, *one, *two) if _stack_bytes(each) <= _MOST_BYTES]


def _leads(first: Product | Convolution, windows: Windows, readers: Counter[Buffer]) -> bool:
    """Whether a window reads all of what a stage makes as that lies, one image, and nobody else does."""
    alone = readers[first.out.buffer] == 1 and first.out.buffer.is_own and windows.a.offset == first.out.offset == 0
    whole = windows.a.shape[0] == 1 and windows.a.rows() == first.out_step and _elements(first) == _pixels(windows.a.shape)
    if isinstance(first, Convolution):
        return alone and whole and first.weight.groups == 1
    return alone and whole


def _elements(first: Product | Convolution) -> tuple[int, int]:
    if isinstance(first, Product):
        return first.rows, first.weight.columns
    n, c, h, w = first.out.shape
    return n * h * w, c


def _pixels(shape: Sequence[int]) -> tuple[int, int]:
    n, c, h, w = shape
    return n * h * w, c


def _follows(last: Product, windows: Windows, readers: Counter[Buffer]) -> bool:
    """Whether a product reads all of what a window makes, and nobody else does."""
    out = windows.out
    alone = readers[out.buffer] == 1 and out.buffer.is_own and last.a.offset == out.offset == 0
    return alone and out.shape[0] == 1 and last.a_step == windows.out_step and (last.rows, last.k) == _pixels(out.shape)


def _stack_bytes(block: Block) -> int:
    its, step = block.windows, stepped(block.windows.a.shape[1])
    span = (its.geometry.kernel[0] - 1) * its.geometry.dilation[0] + 1
    ring = span * its.a.shape[3] * (its.a.rows() or step) if block.first is not None else 0
    return 4 * (ring + (its.out.shape[3] * step if block.last is not None else 0))


def _best(blocks: Sequence[Block], groups: Collection[frozenset[Node]] | None, taken: Collection[Stage]) -> Block | None:
    """The largest that wins."""
    free = [block for block in blocks if not any(part in taken for part in block.parts)]
    return next((block for block in free if groups is None or _wins(block, groups)), None)


def _wins(block: Block, groups: Collection[frozenset[Node]]) -> bool:
    if block.windows.kind == "Weighted":
        return frozenset(node for node in block.nodes if is_complex(node)) in groups
    between = sum(4 * stepped(part.out.shape[1]) * _pixels(part.out.shape)[0] for part in block.parts[:-1])
    return between > _NEAR_BYTES


def _groups(body: Graph, fixed: Collection[Value]) -> set[frozenset[Node]]:
    """The complex operators that are joined, as nodes of the body."""
    typed, origin = _with_parameters(body, fixed)
    groups = reform(partition(typed), Measured(Model(_MACHINE), Store(()), exists=_exists))
    joined = [group for group in groups if group.scheme is Scheme.ROWS]
    return {frozenset(origin[node] for node in group.nodes if is_complex(node)) for group in joined}


def _exists(parts: Sequence[Part], scheme: Scheme) -> bool:
    """Whether there may be a block of these parts: one depthwise operator, with at most one other on either side."""
    deep = [at for at, part in enumerate(parts) if part.reuse is not None and not part.reuse.again]
    return scheme is Scheme.ROWS and len(deep) == 1 and deep[0] <= 1 and len(parts) - deep[0] <= 2


def _with_parameters(body: Graph, fixed: Collection[Value]) -> tuple[Graph, dict[Node, Node]]:
    """The body with its constants as parameters, not as arguments, and which node each of its nodes is."""
    storages: dict[Storage, Storage] = {}
    for value in body.inputs:
        kind = Kind.PARAMETER if value in fixed else Kind.ACTIVATION
        storages[value.storage] = replace(value.storage, kind=kind)
    new: dict[Value, Value] = {}

    def taken(value: Value) -> Value:
        return new.setdefault(value, replace(value, storage=storages.get(value.storage, value.storage)))

    def arg(each: Arg) -> Arg:
        if isinstance(each, Value):
            return taken(each)
        return tuple(map(arg, each)) if isinstance(each, tuple) else each

    nodes, origin = [], {}
    for node in body.nodes:
        outputs = tuple(None if value is None else taken(value) for value in node.outputs)
        made = replace(
            node, args=tuple(map(arg, node.args)), kwargs=tuple((name, arg(each)) for name, each in node.kwargs), outputs=outputs
        )
        nodes.append(made)
        origin[made] = node
    return Graph(tuple(map(taken, body.inputs)), tuple(nodes), tuple(map(taken, body.outputs))), origin
