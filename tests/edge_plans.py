"""Plans of networks for small devices, made by the simplest means: every block apart, or placed in one space."""

import dataclasses

from lowtide.edge.graph import EdgeGraph
from lowtide.edge.plan import EdgeBlock, EdgePlan, Space
from lowtide.placement.auto import place
from lowtide.problems.placement import PlaceProblem

ONE = (Space("sram"),)


def lives(graph: EdgeGraph) -> dict[int, tuple[int, int]]:
    """[start, end) of each tensor that is no constant, in the graph's own order: inputs from the start, results to the end."""
    count = len(graph.nodes)
    start = dict.fromkeys(graph.inputs, 0)
    end = dict.fromkeys(graph.inputs, 0)
    for step, node in enumerate(graph.nodes):
        for at in node.outputs:
            if graph.tensors[at].dtype:
                start[at], end[at] = step, step + 1
        for at in node.inputs:
            if at in start:
                end[at] = step + 1
    end |= {at: count for at in graph.outputs if at in start}
    return {at: (start[at], end[at]) for at in start}


def plan_apart(graph: EdgeGraph) -> EdgePlan:
    """Every tensor in a block of its own, one behind the other, there from the first step to the last."""
    blocks, offset = [], 0
    for at in lives(graph):
        size = graph.tensors[at].size_bytes
        blocks.append(EdgeBlock((at,), 0, offset, size, 0, len(graph.nodes)))
        offset += size
    return EdgePlan(graph, ONE, tuple(range(len(graph.nodes))), tuple(blocks))


def plan_shared(graph: EdgeGraph) -> EdgePlan:
    """Blocks that hold views, and in-place results of inputs that die, placed in the smallest arena that is found."""
    life = lives(graph)
    block_of: dict[int, int] = {}
    members: list[list[int]] = []
    ends: list[int] = []
    for at in graph.inputs:
        _own_block(at, life, block_of, members, ends)
    for step, node in enumerate(graph.nodes):
        for position, at in enumerate(node.outputs):
            if at not in life:
                continue
            views = [node.inputs[one] for output, one in node.views if output == position]
            dying = [node.inputs[one] for output, one in node.in_place if output == position]
            dying = [
                one
                for one in dying
                if one in block_of and ends[block_of[one]] == step + 1 and not set(members[block_of[one]]) & set(graph.outputs)
            ]
            taken = next((one for one in (*views, *dying) if one in block_of), None)
            if taken is None:
                _own_block(at, life, block_of, members, ends)
            else:
                block_of[at] = block_of[taken]
                members[block_of[taken]].append(at)
                ends[block_of[taken]] = max(ends[block_of[taken]], life[at][1])
    starts = [min(life[at][0] for at in group) for group in members]
    sizes = [max(graph.tensors[at].size_bytes for at in group) for group in members]
    placement = place(PlaceProblem.of(sizes, starts, ends))
    blocks = [
        EdgeBlock(tuple(group), 0, offset, size, start, end)
        for group, offset, size, start, end in zip(members, placement.offsets, sizes, starts, ends, strict=True)
    ]
    return EdgePlan(graph, ONE, tuple(range(len(graph.nodes))), tuple(blocks))


def _own_block(at: int, life: dict[int, tuple[int, int]], block_of: dict[int, int], members: list[list[int]], ends: list[int]) -> None:
    block_of[at] = len(members)
    members.append([at])
    ends.append(life[at][1])


def with_block(plan: EdgePlan, index: int, **changes: object) -> EdgePlan:
    """The plan with one of its blocks changed."""
    blocks = list(plan.blocks)
    blocks[index] = dataclasses.replace(blocks[index], **changes)
    return dataclasses.replace(plan, blocks=tuple(blocks))
