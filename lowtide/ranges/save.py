"""Plans of a range as JSON, without any code in it: for each part of the range and each program what was measured, and the members.

    {"format": "lowtide.range", "version": 1, "torch": "2.13.0", "lowtide": "0.1.0", "device": "cpu",
    "granule_bytes": 1, "memory_bytes": 8000000, "latency": null,
    "parts": [{"dimensions": "rows in 2..8", "programs": [
        {"program": "9f86d08188...", "candidates": [...], "orders": [...], "members": [...]}]}],
    "checksum": "2c26b46b68..."}

A candidate is known by the hash of its graph and by what algebra did. For programs that were captured anew, a file gives a planner that has
nothing to search: graphs are made anew from the captured ones and compared by hash, orders and sequences are checked, and what members take
is counted anew, as it follows from sizes. A file of another version is refused: make the plans again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from lowtide.base import fields
from lowtide.base.fields import SEAL, checksum
from lowtide.cost.measures import Measures
from lowtide.errors import CheckError, FormatError, LowtideError
from lowtide.ir.check.graph_check import check_order
from lowtide.ir.graph import Graph, HeldStorages
from lowtide.plan.plan import program_hash
from lowtide.planning.candidate import Candidate, equal_graphs
from lowtide.planning.replan import of_another_program
from lowtide.planning.request import Request
from lowtide.ranges.candidate import Ranged, same_everywhere
from lowtide.ranges.family import Member, PlanFamily, in_order, in_sequence
from lowtide.ranges.planner import RangePlanner
from lowtide.remat.cost import runs_all
from lowtide.rewrite.rewritings import rewritten_with

FORMAT, _VERSION = "lowtide.range", 1
_WHERE = "plans of a range"
_MOST_CHARACTERS = 2**28
# Of numbers that are not from 0 on.
_LEAST = {"granule_bytes": 1, "memory_bytes": 1, **dict.fromkeys(("latency", "smallest_us", "applied_rules"), -math.inf)}


@dataclass(frozen=True)
class WrittenMember:
    """An order of a candidate's nodes, or a sequence in which some run again."""

    candidate: int
    order: tuple[int, ...]
    sequence: tuple[int, ...] | None


@dataclass(frozen=True)
class WrittenCandidate:
    graph: str  # its hash
    applied_rules: tuple[tuple[str, str, float], ...]  # what algebra did: rule, storage that was held, microseconds
    smallest_us: float | None  # by how much longer it takes at the smallest point; None where nobody knows
    points: tuple[tuple[int, ...], ...]  # [k] that were measured
    workspace_bytes: tuple[tuple[int, ...], ...]  # [k, nodes]
    node_us: tuple[tuple[float, ...], ...]  # [k, nodes]; empty where times do not matter


@dataclass(frozen=True)
class WrittenProgram:
    program: str  # hash of the captured program
    candidates: tuple[WrittenCandidate, ...]
    orders: tuple[WrittenMember, ...]
    members: tuple[WrittenMember, ...]

    def __post_init__(self) -> None:
        if not (self.candidates and self.orders and self.members):
            raise FormatError(f"{_WHERE}: expected candidates, orders and members of each program")
        for member in (*self.orders, *self.members):
            if not 0 <= member.candidate < len(self.candidates):
                raise FormatError(f"{_WHERE}: expected one of {len(self.candidates)} candidates, got {member.candidate}")


@dataclass(frozen=True)
class WrittenPart:
    """A part of the range for which programs were captured together."""

    dimensions: str  # as people read it
    programs: tuple[WrittenProgram, ...]


@dataclass(frozen=True)
class WrittenRange:
    torch: str  # version
    lowtide: str  # version
    device: str
    granule_bytes: int
    memory_bytes: int | None  # the limit
    latency: float | None
    parts: tuple[WrittenPart, ...]

    @property
    def is_limited(self) -> bool:
        return self.memory_bytes is not None or self.latency is not None

    def to_json(self) -> str:
        """As text. The same plans give the same text."""
        data = {"format": FORMAT, "version": _VERSION} | asdict(self)
        return json.dumps(data | {SEAL: checksum(data)}, allow_nan=False) + "\n"


def read_range(text: str) -> WrittenRange:
    """What `to_json` wrote; nothing in it is executed. Raises FormatError for any other text."""
    if len(text) > _MOST_CHARACTERS:
        raise FormatError(f"{_WHERE}: expected at most {_MOST_CHARACTERS:,} characters, got {len(text):,}")
    data = fields.parsed(_WHERE, text)
    _check_format(data)
    if fields.string(_WHERE, data, SEAL) != checksum(data):
        raise FormatError(f"{_WHERE}: expected the file as it was written, got one whose {SEAL!r} is another's: save it again")
    own = {name: each for name, each in data.items() if name not in ("format", "version", SEAL)}
    return fields.record(_WHERE, own, WrittenRange, **_LEAST)


def is_range(text: str) -> bool:
    """Whether a text seems to be plans of a range, and not a plan of one shape."""
    return f'"{FORMAT}"' in text[:200]


def _check_format(data: Any) -> None:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        of_one = isinstance(data, dict) and data.get("format") == "lowtide.plan"
        more = ", got a plan of one shape: leave `dynamic` out to use it, or save the step of a range by step.save(path)" if of_one else ""
        raise FormatError(f'{_WHERE}: expected a JSON object with "format": "{FORMAT}"{more}')
    if fields.integer(_WHERE, data, "version") != _VERSION:
        raise FormatError(f"{_WHERE}: expected version {_VERSION}, got {data['version']}: it is of another lowtide; make the plans again")


_CHANGED = "the saved plans were changed: {}; leave `plan` out to make new ones"


def written_range(parts: Sequence[tuple[Sequence[Graph], Sequence[PlanFamily]]]) -> WrittenRange:
    """What was planned for the parts of a range, each the captured graphs and their families.

    Raises FormatError for a program that text cannot hold.
    """
    request = parts[0][1][-1].request
    provenance, budget = request.provenance, request.budget
    written = tuple(WrittenPart(_range_text(graphs), tuple(map(_program, graphs, families))) for graphs, families in parts)
    settings = (request.granule_bytes, budget.memory_bytes, budget.latency)
    return WrittenRange(provenance.torch, provenance.lowtide, provenance.device, *settings, written)


def part_for(saved: WrittenRange, graphs: Sequence[Graph], request: Request) -> WrittenPart | None:
    """What was saved for programs that were captured together; None where nothing was."""
    names = [_name(graph, request) for graph in graphs]
    return next((part for part in saved.parts if [each.program for each in part.programs] == names and "" not in names), None)


def refuse_other(saved: WrittenRange, graphs: Sequence[Graph], request: Request) -> None:
    """Raises FormatError where nothing was saved for programs, which says what there is."""
    if part_for(saved, graphs, request) is not None:
        return
    there, here = "; ".join(part.dimensions for part in saved.parts), _range_text(graphs)
    if here not in [part.dimensions for part in saved.parts]:
        raise FormatError(
            f"the saved plans are of another range: for {there}; here it is {here}: say the range that they are for, or leave `plan` out"
        )
    raise of_another_program(saved.torch, saved.device, request.provenance)


def planner_of(part: WrittenPart, programs: Sequence[tuple[Graph, HeldStorages]], request: Request, *, limited: bool) -> RangePlanner:
    """A planner of captured graphs, each with the gradients that eager holds, that knows what was saved for them.

    Raises FormatError where that is not for them, or rounds otherwise than eager although that is asked for.
    """
    try:
        ranged = [_ranged(graph, held_storages, each) for (graph, held_storages), each in zip(programs, part.programs, strict=True)]
        planner = RangePlanner(ranged)
        _refuse_rounded(ranged, request)
        orders = [_members(program, each.orders, request) for program, each in zip(ranged, part.programs, strict=True)]
        members = [_members(program, each.members, request) for program, each in zip(ranged, part.programs, strict=True)]
    except FormatError:
        raise
    except (LowtideError, IndexError, ValueError) as error:
        raise FormatError(_CHANGED.format(error)) from error
    planner.know(request, orders, members if limited else None)
    return planner


def _program(graph: Graph, family: PlanFamily) -> WrittenProgram:
    name = _name(graph, family.request)
    if not name:
        raise FormatError("this program cannot be saved: it has an operator or a constant that text cannot hold")
    return WrittenProgram(
        name, tuple(map(_candidate, family.candidates)), tuple(map(_written, family.orders)), tuple(map(_written, family.members))
    )


def _candidate(ranged: Ranged) -> WrittenCandidate:
    measures = ranged.measures
    return WrittenCandidate(
        program_hash(ranged.graph),
        tuple((applied_rule.rule, applied_rule.storage.name, applied_rule.cost_us) for applied_rule in ranged.applied_rules),
        ranged.extra_us[0] if math.isfinite(ranged.extra_us[0]) else None,
        tuple(tuple(point.values()) for point in measures.grid.points),
        tuple(map(tuple, measures.workspace_bytes.tolist())),
        tuple(map(tuple, measures.node_us.tolist())) if measures.node_us.size else (),
    )


def _written(member: Member) -> WrittenMember:
    return WrittenMember(member.candidate, member.own_order, None if member.sequence is None else tuple(member.sequence.tolist()))


def _ranged(graph: Graph, held_storages: HeldStorages, written: WrittenProgram) -> tuple[Ranged, ...]:
    """The graphs of one program, with what was measured; the captured one first. Raises FormatError for a graph that it does not become."""
    graphs = equal_graphs(graph)
    equal = {program_hash(same_everywhere(each)): each for each in reversed(graphs)}
    if written.candidates[0].applied_rules or equal.get(written.candidates[0].graph) is not graph:
        raise FormatError(_CHANGED.format("the captured graph is not the first of them"))
    ranged = [_candidate_again(equal, graphs[-1], each) for each in written.candidates]
    return replace(ranged[0], held_by_eager=held_storages), *ranged[1:]


def _candidate_again(equal: Mapping[str, Graph], last: Graph, written: WrittenCandidate) -> Ranged:
    """One of the equal graphs, or the last of them as algebra has rewritten it."""
    if not written.applied_rules and written.graph in equal:
        graph = equal[written.graph]
        return Ranged.of(graph, _measures(graph, written))
    rewriting = rewritten_with(last, {(rule, name): cost_us for rule, name, cost_us in written.applied_rules})
    if program_hash(same_everywhere(rewriting.graph)) != written.graph:
        raise FormatError(_CHANGED.format("one of their graphs is not what the program is rewritten to"))
    return Ranged.by_algebra(
        rewriting, _measures(rewriting.graph, written), math.inf if written.smallest_us is None else written.smallest_us
    )


def _measures(graph: Graph, written: WrittenCandidate) -> Measures:
    names = [each.name for each in graph.dimensions]
    points = [dict(zip(names, point, strict=True)) for point in written.points]
    spaces = np.array(written.workspace_bytes, np.int64).reshape(len(points), -1)
    return Measures.of(graph, points, spaces, np.array(written.node_us, np.float64) if written.node_us else ())


def _members(program: tuple[Ranged, ...], written: Sequence[WrittenMember], request: Request) -> tuple[Member, ...]:
    return tuple(_member(program, each, request) for each in written)


def _member(program: tuple[Ranged, ...], written: WrittenMember, request: Request) -> Member:
    """A member, checked. Raises CheckError and FormatError."""
    ranged = program[written.candidate]
    if written.sequence is None:
        check_order(ranged.graph, written.order)
        return in_order(program, written.candidate, written.order, request)
    sequence = np.array(written.sequence, np.int32)
    if not runs_all(ranged.remat_problem(request).structure, sequence):
        raise CheckError("a sequence does not run what the program does, or it was made with other settings of `swap` and `state`")
    return in_sequence(program, written.candidate, sequence, request)


def _refuse_rounded(programs: Sequence[tuple[Ranged, ...]], request: Request) -> None:
    if request.exact and not all(each.exact for program in programs for each in program):
        raise FormatError("the saved plans may round otherwise than eager: say exact=False, or leave `plan` out to make new ones")


def _name(graph: Graph, request: Request) -> str:
    return Candidate(graph, ()).program(request.provenance.torch, request.granule_bytes)


def _range_text(graphs: Sequence[Graph]) -> str:
    return ", ".join(each.ranged for each in graphs[-1].dimensions) or "one shape"
