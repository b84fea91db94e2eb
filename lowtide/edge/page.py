"""A plan as a page: a lane for each memory, steps from left to right, addresses upwards. It holds all it shows, and asks no network."""

from __future__ import annotations

import html

from lowtide.base.messages import bytes_text
from lowtide.edge.plan import EdgeBlock, EdgePlan

_LANE = 260  # pixels
_COLOURS = {"tensor": "#3572b0", "moved": "#d9822b", "weights": "#5d9a52", "workspace": "#8a8f98", "cut": "#8e5ea2"}
_STYLE = (
    ":root { color-scheme: light dark } body { font: 14px system-ui, sans-serif; max-width: 1040px; margin: 2em auto; padding: 0 1em }"
    " svg { width: 100%; border: 1px solid #8888; border-width: 0 0 1px 1px } rect { stroke: Canvas; vector-effect: non-scaling-stroke }"
    " rect:hover { opacity: .7 } i { display: inline-block; width: 1em; height: 1em; margin: 0 .3em 0 1em; vertical-align: -2px }"
) + "".join(f" .{kind} {{ fill: {colour}; background: {colour} }}" for kind, colour in _COLOURS.items())
_KINDS = {
    "tensor": "tensors", "moved": "moved to here", "weights": "weights", "workspace": "workspaces", "cut": "rings of a cut",
}  # fmt: skip


def to_page(plan: EdgePlan) -> str:
    """The page of a plan as HTML. A block tells its tensors, bytes and steps to who points at it."""
    name = html.escape(plan.graph.name)
    kinds = [_kind(plan, at) for at in range(len(plan.blocks))]
    legend = "".join(f'<i class="{kind}"></i>{text}' for kind, text in _KINDS.items() if kind in kinds)
    lanes = "".join(_lane(plan, space, kinds) for space in range(len(plan.spaces)))
    promises = "".join(f"<p>{html.escape(line)}</p>" for line in str(plan).splitlines())
    return (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
        f"<h1>{name}</h1>{promises}<p>{legend}</p>{lanes}</html>\n"
    )


def _lane(plan: EdgePlan, space: int, kinds: list[str]) -> str:
    """What lies in one memory: as high as its arena."""
    memory, steps, top = plan.spaces[space], len(plan.order), max(1, plan.arena_bytes[space])
    boxes = [
        f'<rect class="{kinds[at]}" x="{block.start}" y="{top - block.offset_bytes - block.size_bytes}" width="{block.end - block.start}"'
        f' height="{block.size_bytes}"><title>{html.escape(_caption(plan, block))}</title></rect>'
        for at, block in enumerate(plan.blocks)
        if block.space == space
    ]
    return (
        f"<h2>{html.escape(memory.name)}: {bytes_text(plan.arena_bytes[space])}</h2>"
        f'<svg viewBox="0 0 {steps} {top}" height="{_LANE}" preserveAspectRatio="none" role="img">{"".join(boxes)}</svg>'
        f"<p>steps 0 to {steps - 1}, bytes 0 to {top}</p>"
    )


def _kind(plan: EdgePlan, at: int) -> str:
    block = plan.blocks[at]
    if not block.tensors:
        return "cut" if plan.graph.nodes[plan.order[block.start]].kind == "Cut" else "workspace"
    if any(move.to == at for move in plan.moves):
        return "moved"
    return "weights" if all(plan.graph.tensors[tensor].constant for tensor in block.tensors) else "tensor"


def _caption(plan: EdgePlan, block: EdgeBlock) -> str:
    names = (
        ", ".join(plan.graph.tensors[tensor].name for tensor in block.tensors) or f"for {plan.graph.nodes[plan.order[block.start]].name}"
    )
    return f"{names}: {block.size_bytes:,} bytes at {block.offset_bytes:,}, steps {block.start} to {block.end - 1}"
