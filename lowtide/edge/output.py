"""A plan as JSON, as a C header of offsets and as a page. JSON is read as data, for the graph that it was made for, and is checked.

On the page are a lane for each memory, steps from left to right, addresses upwards. It holds all it needs, in one file.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, astuple
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from lowtide.base.fields import boolean, check_fields, integer, integers, record, refuse, without_repeats
from lowtide.base.files import template
from lowtide.base.messages import bytes_text
from lowtide.edge.check import check
from lowtide.edge.cuts import Cut, cut_body, with_cuts, with_inputs_outside
from lowtide.edge.graph import EdgeGraph
from lowtide.edge.plan import EdgeBlock, EdgePlan, Move, Space, check_rate
from lowtide.errors import CheckError, FormatError
from lowtide.problems import Status

_FORMAT = "lowtide edge plan 1"
_PAGE, _HEADER = (Path(__file__).with_name(name) for name in ("plan.html", "plan.h"))
_FIELDS = {
    "format", "network", "digest", "spaces", "order", "blocks", "moves", "macs_per_s", "constants_bytes_per_s", "dma", "time_ps", "least",
    "bound", "status", "gap", "cuts", "inputs_outside",
}  # fmt: skip
_BLOCK_FIELDS = {"tensors", "names", "space", "offset", "size", "start", "end", "starts"}


def digest(graph: EdgeGraph) -> str:
    """What a plan depends on of a network: its operators, tensors and what may be written over what. Not its numbers."""
    tensors = [(each.name, each.size_bytes, each.constant) for each in graph.tensors]
    nodes = [
        (each.name, each.kind, each.inputs, each.outputs, each.macs, each.workspace_bytes, each.views, each.in_place)
        for each in graph.nodes
    ]  # fmt: skip
    return sha256(json.dumps([tensors, nodes, graph.inputs, graph.outputs]).encode()).hexdigest()


def to_figures(plan: EdgePlan) -> dict[str, Any]:
    """What a plan's JSON holds: steps and nodes by number, sizes in bytes, times in picoseconds."""
    return {
        "format": _FORMAT,
        "network": plan.graph.name,
        "digest": digest(plan.graph),
        "status": plan.status.name.lower(),
        **{name: getattr(plan, name) for name in ("least", "bound", "gap", "time_ps", "macs_per_s", "constants_bytes_per_s", "dma")},
        "spaces": [
            asdict(memory) | {"arena_bytes": arena_bytes} for memory, arena_bytes in zip(plan.spaces, plan.arena_bytes, strict=True)
        ],
        "order": list(plan.order),
        "blocks": [
            {
                "tensors": list(block.tensors), "names": [plan.graph.tensors[tensor].name for tensor in block.tensors],
                "space": block.space, "offset": block.offset_bytes, "size": block.size_bytes,
                "start": block.start, "end": block.end, "starts": list(block.starts),
            }
            for block in plan.blocks
        ],
        "moves": [[move.block, move.to, move.before] for move in plan.moves],
        "cuts": [list(astuple(cut)) for cut in plan.cuts],
        "inputs_outside": bool(plan.graph.inputs) and all(plan.graph.tensors[at].constant for at in plan.graph.inputs),
    }  # fmt: skip


def to_json(plan: EdgePlan) -> str:
    """A plan as text, of which `from_json` makes the same plan."""
    return json.dumps(to_figures(plan), indent=1) + "\n"


def from_json(text: str, graph: EdgeGraph) -> EdgePlan:
    """The plan of `graph` that a text holds. Raises FormatError for another text or network, CheckError for a wrong plan."""
    try:
        item = json.loads(text, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"edge plan: expected JSON: {error}") from error
    check_fields("edge plan", item, _FIELDS)
    if item.get("format") != _FORMAT:
        refuse("edge plan", "format", repr(_FORMAT), item.get("format"))
    spaces = tuple(_memory(each) for each in _list(item, "spaces"))
    if "inputs_outside" in item and boolean("edge plan", item, "inputs_outside"):
        graph = with_inputs_outside(graph)
    cuts = [_cut(each) for each in _list(item, "cuts")] if "cuts" in item else []
    graph = with_cuts(graph, cuts, max([1, *(memory.align_bytes for memory in spaces)])) if cuts else graph
    if item.get("digest") != digest(graph):
        raise FormatError(f"edge plan: expected a plan of {graph.name} as it is now, got one of another network: plan it anew")
    statuses = {status.name.lower(): status for status in Status}
    if not isinstance(item.get("status"), str) or item["status"] not in statuses:
        refuse("edge plan", "status", f"one of {', '.join(statuses)}", item.get("status"))
    plan = EdgePlan(
        graph,
        spaces,
        integers("edge plan", item, "order"),
        tuple(_block(index, each) for index, each in enumerate(_list(item, "blocks"))),
        tuple(_move(each) for each in _list(item, "moves")),
        macs_per_s=_rate(item, "macs_per_s"),
        constants_bytes_per_s=_rate(item, "constants_bytes_per_s"),
        dma=boolean("edge plan", item, "dma"),
        time_ps=None if item.get("time_ps") is None else integer("edge plan", item, "time_ps"),
        least=None if item.get("least") is None else integer("edge plan", item, "least"),
        bound=integer("edge plan", item, "bound"),
        status=statuses[item["status"]],
    )
    if plan.status is Status.UNKNOWN:
        raise CheckError("edge plan: expected a plan that is feasible or optimal, got unknown")
    check(plan)
    return plan


def _cut(item: Any) -> Cut:
    kinds = (int, int, int, int, int, bool)
    if not isinstance(item, list) or [type(each) for each in item] != list(kinds):
        raise FormatError(f"a cut: expected [first, last, axis, band axis, band, staged], got {item!r:.80}")
    return Cut(*item)


def _list(item: dict[str, Any], field: str) -> list[Any]:
    value = item.get(field)
    return value if isinstance(value, list) else refuse("edge plan", field, "a list", value)


def _rate(item: dict[str, Any], field: str) -> float | None:
    rate: float | None = item.get(field)
    check_rate(f"edge plan: {field}", rate)
    return rate


def _memory(item: Any) -> Space:
    """A space checks its own numbers; the bytes of its arena follow from blocks."""
    own = {name: each for name, each in item.items() if name != "arena_bytes"} if isinstance(item, dict) else item
    return record("a space", own, Space)


def _block(index: int, item: Any) -> EdgeBlock:
    where = f"block {index}"
    check_fields(where, item, _BLOCK_FIELDS)
    space, offset, size, start, end = (integer(where, item, field) for field in ("space", "offset", "size", "start", "end"))
    return EdgeBlock(integers(where, item, "tensors"), space, offset, size, start, end, integers(where, item, "starts"))


def _move(item: Any) -> Move:
    if not isinstance(item, list) or len(item) != 3 or not all(isinstance(each, int) and not isinstance(each, bool) for each in item):
        raise FormatError(f"a move: expected [block, to, before], got {item!r:.80}")
    return Move(*item)


def to_header(plan: EdgePlan) -> str:
    """A plan as a C header: the bytes of each arena, the order, and where each tensor lies when it is made.

    Moves and the later places of what is moved are a table of bytes to copy. Names are those of the network, in C's letters.
    """
    bodies = ((index, node.name, cut_body(node)) for index, node in enumerate(plan.graph.nodes))
    cuts = [(index, name, astuple(body.cut), [*map(astuple, body.rings)]) for index, name, body in bodies if body is not None]
    words = {"unique": partial(_unique, set()), "c_name": _c_name, "comment": _comment, "braced": _braced}
    moves = [_copied(plan, move) for move in plan.moves]
    return f"{template(_HEADER).render(plan=plan, cuts=cuts, moves=moves, **words)}\n"


def _copied(plan: EdgePlan, move: Move) -> tuple[int, ...]:
    source, target = plan.blocks[move.block], plan.blocks[move.to]
    return move.before, source.space, source.offset_bytes, target.space, target.offset_bytes, source.size_bytes


def _braced(item: Any) -> str:
    """Numbers, and rows of them, as C initialises an array."""
    return f"{{{', '.join(map(_braced, item))}}}" if isinstance(item, tuple | list) else str(int(item))


def _unique(names: set[str], stem: str, what: str) -> str:
    """A macro that no other has: of two alike the second has a number."""
    name, count = f"{_c_name(stem).upper()}_{what}", 1
    while name in names:
        count += 1
        name = f"{_c_name(stem).upper()}_{count}_{what}"
    names.add(name)
    return name


def _c_name(text: str) -> str:
    return re.sub(r"\W", "_", text, flags=re.ASCII) or "_"


def _comment(text: str) -> str:
    return re.sub(r"[^ -~]|\*/|/\*|\\", "_", text)


def to_page(plan: EdgePlan) -> str:
    """The page of a plan as HTML. A block tells its tensors, bytes and steps to who points at it."""
    blocks = [(_kind(plan, at), block, _tensors(plan, block)) for at, block in enumerate(plan.blocks)]
    return str(template(_PAGE).render(plan=plan, blocks=blocks, bytes_text=bytes_text))


def _kind(plan: EdgePlan, at: int) -> str:
    block = plan.blocks[at]
    if not block.tensors:
        return "cut" if plan.graph.nodes[plan.order[block.start]].kind == "Cut" else "workspace"
    if any(move.to == at for move in plan.moves):
        return "moved"
    return "weights" if all(plan.graph.tensors[tensor].constant for tensor in block.tensors) else "tensor"


def _tensors(plan: EdgePlan, block: EdgeBlock) -> str:
    names = ", ".join(plan.graph.tensors[tensor].name for tensor in block.tensors)
    return names or f"for {plan.graph.nodes[plan.order[block.start]].name}"
