"""A body as a network: its source, its arena, and the constants that are prepared for it.

Addresses in the arena are a placement problem: a buffer lives from the stage that first writes it to the end of the last that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from lowtide.cpu.heads import head_of
from lowtide.cpu.known import following
from lowtide.cpu.layout import LANES, SLACK, Buffer
from lowtide.cpu.recipes import Packed, Plain, Target, offsets_of
from lowtide.cpu.source import ElementOffsets, source_of
from lowtide.cpu.stages import KernelStage, with_blocks
from lowtide.cpu.staging import Staging
from lowtide.ir.graph import Graph, Node, Value
from lowtide.problems.placement import PlaceProblem

ITEM_BYTES = 4


def buffers(stages: Sequence[KernelStage]) -> list[Buffer]:
    """The arena's buffers, in the order of their first use."""
    places = dict[Buffer, None]()
    for stage in stages:
        for layout in (stage.out, *stage.reads):
            if layout.buffer.is_own:
                places[layout.buffer] = None
    return list(places)


def problem_of(stages: Sequence[KernelStage]) -> PlaceProblem:
    """The placement problem of `buffers`, one step a stage. Each buffer has room behind it for what is read past its end."""
    first, last = dict[Buffer, int](), dict[Buffer, int]()
    for step, stage in enumerate(stages):
        for layout in (stage.out, *stage.reads):
            first.setdefault(layout.buffer, step)
            last[layout.buffer] = step
    own = buffers(stages)
    return PlaceProblem.of(
        [-(-(each.elements + SLACK) // LANES) * LANES * ITEM_BYTES for each in own],
        [first[each] for each in own],
        [last[each] + 1 for each in own],
        names=[each.name for each in own],
        align_bytes=LANES * ITEM_BYTES,
    )


Placing = Callable[[PlaceProblem], tuple[Sequence[int], int]]  # offsets and the arena's length, in bytes


@dataclass(frozen=True)
class Network:
    """What runs a body."""

    source: str
    stages: tuple[KernelStage, ...]
    arena_bytes: int
    kept_elements: int
    recipes: tuple[Packed, ...]
    live: tuple[int, ...]  # the arguments that differ from call to call
    constants: Graph  # from the fixed arguments to what the recipes read
    results: tuple[Value, ...]


@dataclass(frozen=True)
class StagedBody:
    """A body as stages, before any of them are joined."""

    body: Graph
    fixed: tuple[int, ...]  # the arguments that are constants
    target: Target
    known: frozenset[Value]  # what follows from these
    stages: tuple[KernelStage, ...]
    constants: tuple[Packed, ...]

    @classmethod
    def of(cls, body: Graph, fixed: Sequence[int], target: Target) -> StagedBody:
        """The stages of a body of which the arguments `fixed` are constants."""
        known = frozenset(following(body, [body.inputs[at] for at in fixed]))
        staged = Staging(body, known, target).staged(head_of)
        return cls(body, tuple(fixed), target, known, tuple(staged.stages), tuple(staged.constants))

    def addresses(self, stages: Sequence[KernelStage], placing: Placing) -> tuple[ElementOffsets, int, int]:
        """Where buffers and constants are, if the body runs by these stages; bytes of the arena, elements of constants."""
        offsets, arena_bytes = placing(problem_of(stages))
        places = {buffer: int(offset) // ITEM_BYTES for buffer, offset in zip(buffers(stages), offsets, strict=True)}
        packed, elements = offsets_of(self.constants)
        return ElementOffsets(places, packed), arena_bytes, elements


def network_of(staged: StagedBody, joined: Sequence[int], placing: Placing) -> Network:
    """The network of a body, with the blocks that `choice` has numbered."""
    body, fixed = staged.body, staged.fixed
    stages = with_blocks(staged.stages, joined)
    addresses, arena_bytes, elements = staged.addresses(stages, placing)
    source = source_of(stages, addresses, staged.target)
    wanted = tuple(dict.fromkeys(value for recipe in staged.constants for value in read_by(recipe)))
    constants = Graph(tuple(body.inputs[at] for at in fixed), _makers(body, staged.known, wanted), wanted)
    live = tuple(at for at in range(len(body.inputs)) if at not in set(fixed))
    return Network(source, stages, arena_bytes, elements, staged.constants, live, constants, body.outputs)


def read_by(recipe: Packed) -> list[Value]:
    norm = recipe.norm
    values = [recipe.value] if isinstance(recipe, Plain) else [recipe.weight, recipe.bias]
    if norm is not None:
        values = ([] if isinstance(recipe, Plain) else values) + [norm.gamma, norm.beta, norm.mean, norm.var]
    return [value for value in values if value is not None]


def _makers(body: Graph, known: Collection[Value], wanted: Collection[Value]) -> tuple[Node, ...]:
    needed, makers = set(wanted), list[Node]()
    for node in reversed(body.nodes):
        if any(value in needed for value in node.results) and all(value in known for value in node.results):
            makers.append(node)
            needed.update(node.inputs)
    return tuple(reversed(makers))
