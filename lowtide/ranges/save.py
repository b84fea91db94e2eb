"""What was planned for a range, to be saved; and from what was saved, for programs that were captured anew, a planner that knows it all.

takes   programs that were captured together, and what was saved of such
leaves  a planner that has nothing to search: graphs are made anew from the captured ones and compared by hash, orders and sequences are
        checked, and what members take is counted anew
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from lowtide.cost.measures import Measures
from lowtide.errors import CheckError, FormatError, LowtideError
from lowtide.ir.check.graph_check import check_order
from lowtide.ir.graph import Graph, HeldStorages
from lowtide.plan.plan import program_hash
from lowtide.planning.candidate import Candidate, equal_graphs
from lowtide.planning.request import Request
from lowtide.ranges.candidate import Ranged, same_everywhere
from lowtide.ranges.family import PlanFamily
from lowtide.ranges.member import Member, in_order, in_sequence
from lowtide.ranges.planner import RangePlanner
from lowtide.ranges.range_json import WrittenCandidate, WrittenMember, WrittenPart, WrittenProgram, WrittenRange
from lowtide.remat.cost import runs_all
from lowtide.rewrite.algebra.rewritings import rewritten_with

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
    raise FormatError(
        f"the saved plans are of another program: other model, batch, optimizer settings or versions (made with torch {saved.torch} for "
        f"{saved.device}; here are torch {request.provenance.torch} and {request.provenance.device}); leave `plan` out to make new ones"
    )


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
        ranged.extra_us[0],
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
    return Ranged.by_algebra(rewriting, _measures(rewriting.graph, written), written.smallest_us)


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
        raise CheckError("a sequence does not run what the program does, or it was made with other settings of `swap` and `swap_state`")
    return in_sequence(program, written.candidate, sequence, request)


def _refuse_rounded(programs: Sequence[tuple[Ranged, ...]], request: Request) -> None:
    if request.exact and not all(each.exact for program in programs for each in program):
        raise FormatError("the saved plans may round otherwise than eager: say exact=False, or leave `plan` out to make new ones")


def _name(graph: Graph, request: Request) -> str:
    return Candidate(graph, ()).program(request.provenance.torch, request.granule_bytes)


def _range_text(graphs: Sequence[Graph]) -> str:
    return ", ".join(each.ranged for each in graphs[-1].dimensions) or "one shape"
