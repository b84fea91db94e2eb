"""A body as a network: its source, its arena, and the constants that are prepared for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from lowtide.fuse.blocks import with_blocks
from lowtide.fuse.codegen.source import source_of
from lowtide.fuse.codegen.text import Addresses
from lowtide.fuse.heads import head_of
from lowtide.fuse.memory import ITEM_BYTES, buffers, problem_of
from lowtide.fuse.stages import Stage
from lowtide.fuse.staging import Staging
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.packed import Packed, Plain, Target, offsets_of
from lowtide.problems.placement import PlaceProblem

Placing = Callable[[PlaceProblem], tuple[Sequence[int], int]]  # offsets and the arena's length, in bytes


@dataclass(frozen=True)
class Network:
    """What runs a body."""

    source: str
    stages: tuple[Stage, ...]
    arena_bytes: int
    kept_elements: int
    recipes: tuple[Packed, ...]
    live: tuple[int, ...]  # the arguments that differ from call to call
    constants: Graph  # from the fixed arguments to what the recipes read
    results: tuple[Value, ...]


def network_of(body: Graph, fixed: Sequence[int], target: Target, placing: Placing) -> Network:
    """The network of a body of which the arguments `fixed` are constants."""
    given = [body.inputs[at] for at in fixed]
    known = _following(body, given)
    staged = Staging(body, known, target).staged(head_of)
    stages = with_blocks(staged.stages, body, known)
    offsets, arena_bytes = placing(problem_of(stages))
    addresses = {buffer: int(offset) // ITEM_BYTES for buffer, offset in zip(buffers(stages), offsets, strict=True)}
    packed, elements = offsets_of(staged.constants)
    source = source_of(stages, Addresses(addresses, packed), target)
    wanted = tuple(dict.fromkeys(value for recipe in staged.constants for value in read_by(recipe)))
    constants = Graph(tuple(given), _makers(body, known, wanted), wanted)
    live = tuple(at for at in range(len(body.inputs)) if at not in set(fixed))
    return Network(source, stages, arena_bytes, elements, staged.constants, live, constants, body.outputs)


def read_by(recipe: Packed) -> list[Value]:
    """The values that a recipe reads."""
    norm = recipe.norm
    found = [recipe.value] if isinstance(recipe, Plain) else [recipe.weight, recipe.bias]
    if norm is not None:
        found = ([] if isinstance(recipe, Plain) else found) + [norm.gamma, norm.beta, norm.mean, norm.var]
    return [value for value in found if value is not None]


def _following(body: Graph, given: Collection[Value]) -> set[Value]:
    """What follows from constants alone."""
    known = set(given)
    for node in body.nodes:
        if all(value in known for value in node.inputs):
            known.update(node.results)
    return known


def _makers(body: Graph, known: Collection[Value], wanted: Collection[Value]) -> tuple[Node, ...]:
    needed, found = set(wanted), list[Node]()
    for node in reversed(body.nodes):
        if any(value in needed for value in node.results) and all(value in known for value in node.results):
            found.append(node)
            needed.update(node.inputs)
    return tuple(reversed(found))
