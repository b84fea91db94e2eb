"""How much memory operators take for themselves: the temporaries inside a call, which no graph shows.

    takes   nodes of a graph with concrete sizes
    leaves  a workspace in bytes for each node; what could not be measured, and why; which results look otherwise than the graph says

The workspace of a node is the highest allocator level during its call above the level at its start, less the bytes of the storages that it
makes in the graph. Results that nobody reads are not in the graph, hence part of the workspace. Each distinct call is tried once, as
`laboratory` says. Only views, arithmetic on numbers and collectives are not. Element-wise operators are: they convert mixed types in
temporaries, and a few (native_dropout_backward, ldexp) hold one as large as their result.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from lowtide.base.messages import warn
from lowtide.cost.bodies import bodies, collective_bytes, inner_peak_bytes
from lowtide.cost.laboratory import SHOWN, Call, Laboratory, Unmeasured, device_of
from lowtide.cost.trials import numbers
from lowtide.errors import FormatError
from lowtide.ir.bodies import Region, is_loop, is_region
from lowtide.ir.graph import Node, Storage
from lowtide.ir.operators.nodes import is_arithmetic, is_collective
from lowtide.ir.result_specs import Results, made_as


@dataclass(frozen=True)
class Workspaces:
    nbytes: tuple[int, ...]  # by node; 0 where unknown
    unknown_nodes: int
    unknown: tuple[Unmeasured, ...]  # the distinct calls behind them
    measured_calls: int  # distinct calls that were run now; the others were remembered, or need none
    unlike: tuple[Node, ...]  # nodes whose results look otherwise than the graph says


def measure_workspaces(
    nodes: Sequence[Node], *, among: Sequence[Node] | None = None, remember: bool = True, laboratory: Laboratory | None = None
) -> Workspaces:
    """The workspace of each node, on the device of what it makes; `among` are all of their graph's, where these are some of them.

    A call whose arguments and results pass a quarter of the device's free memory is not run, and one that fails is not hidden: both are
    listed as unknown. `remember=False` neither reads nor writes the disk. A `laboratory` that is given stays open. The caller's random
    state stays as it is.
    """
    with nullcontext(laboratory) if laboratory is not None else Laboratory(remember=remember) as used:
        workspaces = _measured(nodes, nodes if among is None else among, used)
        used.keep()
    warn_of_memory(workspaces.unknown, "their temporaries are taken to be none")
    return workspaces


def _measured(nodes: Sequence[Node], among: Sequence[Node], laboratory: Laboratory) -> Workspaces:
    tried_before = laboratory.tried
    unknown: dict[str, Unmeasured] = {}
    unlike: list[Node] = []
    sizes: list[int] = []
    lacking, of_collectives = 0, collective_bytes(among)
    for position, node in enumerate(nodes):
        laboratory.tell(position / len(nodes))
        if is_loop(node):
            pieces = [(body, _measured(body.nodes, body.nodes, laboratory)) for body in bodies(node)]
            sizes.append(max((inner_peak_bytes(body, each.nbytes, round_to=_granule(node)) for body, each in pieces), default=0))
            lacking += any(each.unknown_nodes for _, each in pieces)
            unknown |= {inner.call: inner for _, each in pieces for inner in each.unknown}
            unlike += [node] if any(each.unlike for _, each in pieces) else []
            continue
        if node in of_collectives:
            sizes.append(of_collectives[node])
            continue
        if is_region(node):
            sizes.append(Region.of(node).workspace_bytes)
            continue
        call = None if needs_none(node) else call_of(node, among)
        level_bytes = 0 if call is None else laboratory.level_bytes(call)
        if call is not None and level_bytes is not None and not _is_as_written(node, laboratory.results(call)):
            unlike.append(node)
        if call is not None and call.text in laboratory.failures:
            unknown[call.text] = laboratory.failures[call.text]
        lacking += level_bytes is None
        sizes.append(max(0, level_bytes - made_bytes(node)) if level_bytes else 0)
    return Workspaces(tuple(sizes), lacking, tuple(unknown.values()), laboratory.tried - tried_before, tuple(unlike))


def call_of(node: Node, nodes: Sequence[Node]) -> Call:
    """A node's call, to be tried; `nodes` are those of its graph."""
    try:
        makes_bytes = made_bytes(node)
    except FormatError:  # symbolic sizes: the laboratory says so
        makes_bytes = 0
    return Call(node, nodes, makes_bytes)


def warn_of_memory(unknown: Sequence[Unmeasured], consequence: str) -> None:
    """Say which calls could not be measured for lack of memory, and what is assumed of them. Python shows the same warning once."""
    lacking = [each for each in unknown if each.of_memory]
    if lacking:
        first, more = lacking[0], f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        warn(f"not enough memory to measure {first.call[:SHOWN]} ({first.reason}){more}: {consequence}", RuntimeWarning)


def needs_none(node: Node) -> bool:
    """Whether a node surely needs no workspace: it computes with numbers, or makes nothing but views.

    A collective is tried nowhere, nor is a check of the program's own, which raises whatever the program would.
    """
    if is_arithmetic(node) or is_collective(node) or node.op == "lowtide.require.default":
        return True
    results = [value for value in node.outputs if value is not None]
    if results and not node.writes and all(value.dtype == "scalar" for value in results):
        return True
    return bool(results) and not node.writes and not _made(node)


def made_bytes(node: Node) -> int:
    """What the storages take that a node makes. Raises FormatError for a symbolic size."""
    granule = _granule(node)
    return sum(-(-size // granule) * granule for size in numbers([storage.nbytes for storage in _made(node)]))


def _granule(node: Node) -> int:
    """What the device's allocator rounds to."""
    return 512 if device_of(node).startswith("cuda") else 1


def _made(node: Node) -> set[Storage]:
    """The storages that a node makes: those of its outputs that are not views of its arguments."""
    return {value.storage for value in node.outputs if value is not None} - {value.storage for value in node.inputs}


def _is_as_written(node: Node, results: Results | None) -> bool:
    """Whether what a node makes looks as the graph says. What lies on a storage of its arguments is not made."""
    specs, given = _made(node), results or ()
    for value, real in zip(node.outputs, given, strict=False):
        written = None if value is None or value.storage not in specs else made_as(value)
        if written is None or real is None or (written.dtype == "uint8" and len(given) > 1 and real.nbytes <= written.nbytes):
            continue  # of what one operator leaves for another a graph for a range says how many bytes there are at most
        if not real.is_like(written):
            return False
    return True
