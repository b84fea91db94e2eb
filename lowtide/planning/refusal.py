"""What is said where no plan fits: before any search, of what no plan can do; after one, how much would, and what stands there.

Every sequence holds what is resident beside each operator's arguments and results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lowtide.base.messages import bytes_text, op_text
from lowtide.cost.bodies import workspaces_within
from lowtide.cost.memory import home_bytes, resident_storages, storage_bytes
from lowtide.errors import BudgetError
from lowtide.ir.graph import Graph, Kind, Node
from lowtide.plan.cost_report import HostPoint
from lowtide.plan.plan import CostReport, Plan
from lowtide.plan.snapshot import Snapshot, kinds_text, source_text
from lowtide.plan.summary import snapshot_lines
from lowtide.planning.candidate import Candidate
from lowtide.planning.request import Request
from lowtide.problems.order import Bytes, OrderProblem
from lowtide.split.search import loss_in_parts


@dataclass(frozen=True, eq=False)
class Floor:
    """What any plan of a graph takes at least."""

    graph: Graph
    resident_bytes: int  # throughout; without what may be offloaded
    node: Node | None  # of the largest arguments and results; None where the graph has none
    node_bytes: int  # these, and its workspace

    @property
    def nbytes(self) -> int:
        return self.resident_bytes + self.node_bytes

    @classmethod
    def of(cls, candidate: Candidate, request: Request) -> Floor:
        problem = candidate.bare_problem(request.granule_bytes, request.links is not None and request.swap_state)
        needs = needs_bytes(problem)
        node = int(needs.argmax()) if len(needs) else -1
        graph = candidate.graph
        return cls(graph, int(problem.resident_bytes), graph.nodes[node] if node >= 0 else None, int(needs.max(initial=0)))


def needs_bytes(problem: OrderProblem) -> Bytes:
    """[n] what each node needs by itself: what it reads and makes, and its workspace, less the most that it may take over."""
    taken = np.where(np.diff(problem.take_ptr) > 0, problem.tensor_bytes[problem.take_output], 0) if problem.node_count else 0
    needs: Bytes = problem.own_bytes - taken + problem.sum_by_row(problem.reads, problem.tensor_bytes)
    return needs


def refuse_impossible(programs: Sequence[Sequence[Candidate]], request: Request) -> None:
    """Raises BudgetError where the request's memory is below what some program takes at least, whatever its plan."""
    refuse_small_host([program[0].graph for program in programs if program], request.budget.host_bytes)
    memory_bytes = request.budget.memory_bytes
    if memory_bytes is None:
        return
    floors = [min((Floor.of(each, request) for each in program), key=lambda floor: floor.nbytes) for program in programs]
    highest = max(floors, key=lambda floor: floor.nbytes)
    if highest.nbytes > memory_bytes:
        tried = max(map(len, programs))
        raise _refusal(highest, memory_bytes, request, _ANY if request.exact else _TRIED.format(tried) if tried > 1 else _ONE)


def refuse_small_host(graphs: Sequence[Graph], host_bytes: int | None) -> None:
    """Raises BudgetError where the host is to hold less than what lies there between steps."""
    least = max(map(home_bytes, graphs), default=0)
    if host_bytes is not None and host_bytes < least:
        raise BudgetError(
            f"host: expected at least {least} bytes ({bytes_text(least)}) of pinned memory, which the optimizer's state takes between "
            f"steps, in blocks of powers of two; got {host_bytes} bytes ({bytes_text(host_bytes)}); nothing was searched",
            0,
            searched=False,
            smallest_host_bytes=least,
        )


def _refusal(floor: Floor, memory_bytes: int, request: Request, who: str) -> BudgetError:
    lines = [
        f"memory: expected at least {floor.nbytes} bytes ({bytes_text(floor.nbytes)}), which {who}; "
        f"got {memory_bytes} bytes ({bytes_text(memory_bytes)}); nothing was searched",
        f"resident throughout: {bytes_text(floor.resident_bytes)}: {kinds_text(_by_kind(floor.graph, request.granule_bytes))}",
    ]
    if floor.node is not None:
        where = source_text(floor.node.source)
        what = f"{op_text(floor.node.op)}{f' of {where}' if where else ''}"
        lines.append(f"beside it: {bytes_text(floor.node_bytes)}, arguments, results and workspace of {what}")
    own = floor.resident_bytes >= memory_bytes
    help_text = _OWN if own else f"{_OPERATOR}{split_loss_text(floor.graph, memory_bytes, request)}"
    lines.append(f"what would help: {help_text}; lowtide.explain(...) says how much memory buys what")
    return BudgetError("\n".join(lines), smallest_peak_bytes=floor.nbytes, searched=False)


def split_loss_text(graph: Graph, memory_bytes: int, request: Request) -> str:
    """What else would help where eager's numbers were asked for: the loss in parts, if that needs so much less that it fits; else ""."""
    split = loss_in_parts(graph) if request.exact else None
    if split is None:
        return ""
    least = Floor.of(
        Candidate(split.graph, workspaces_within(split.graph.nodes, round_to=request.granule_bytes), exact=False), request
    ).nbytes
    return (
        f", or to split the loss over {split.over} (`exact=False`), which needs {bytes_text(least)} or more"
        if least <= memory_bytes
        else ""
    )


_ANY = "any plan takes that leaves every number as it is"
_ONE = "this program takes at least; nothing in it was found that could run in parts"
_TRIED = "each of the {} graphs takes that were tried; more or other parts might take less"
_OWN = "more memory, or to hold less: a smaller model, a smaller data type, an optimizer with less state, a smaller batch"
_OPERATOR = "more memory, a smaller batch, or micro-batches (Training(accumulate=2))"


def _by_kind(graph: Graph, granule_bytes: int) -> dict[Kind, int]:
    total: Counter[Kind] = Counter()
    for storage in resident_storages(graph):
        total[storage.kind] += storage_bytes(storage, granule_bytes)
    return dict(total.most_common())


_NAMED = 4  # lines of tensors
_OFFERED = 3  # points of the frontier


def refusal(leanest: Plan, memory_bytes: int, more: str = "") -> BudgetError:
    """The error where `leanest`, a plan with its peak and cost report, still takes more than `memory_bytes`; `more` would help, too.

    Where the host has a limit, `leanest` keeps to it, and no more of the host's memory would do, either.
    """
    assert leanest.peak is not None, "what stands in the way is known"
    assert leanest.cost_report is not None, "and what would fit"
    lines = [
        f"memory: expected at least {leanest.peak_bytes} bytes ({bytes_text(leanest.peak_bytes)}), the smallest peak that was found, "
        f"{_share(leanest.peak_bytes, leanest.eager_peak_bytes)}; got {memory_bytes} bytes ({bytes_text(memory_bytes)})",
        f"resident throughout: {bytes_text(leanest.resident_bytes)}: {kinds_text(_own(leanest.peak))}",
        *snapshot_lines(_made(leanest.peak), most=_NAMED),
        f"what would help: {_offers(leanest.cost_report)}; or a smaller batch{_accumulate(leanest)}{more}",
    ]
    if leanest.cost_report.stopped:
        lines.append(f"the search was ended early ({leanest.cost_report.stopped}): with more time it may find a smaller peak")
    return BudgetError("\n".join(lines), smallest_peak_bytes=leanest.peak_bytes)


def host_refusal(leanest: Plan, memory_bytes: int, host_bytes: int, buys: Sequence[HostPoint], more: str = "") -> BudgetError:
    """The error where the device's memory would do if the host's did.

    `leanest` keeps to the host's limit and takes more of the device than `memory_bytes`; `buys` is what more of the host's would do.
    """
    assert leanest.cost_report is not None, "what would fit is known"
    least = buys[0]
    places = sorted({0, len(buys) - 1})
    order_us = leanest.cost_report.order_us
    offers = ", ".join(
        f'memory={{"cuda": {memory_bytes}, "host": {buys[place].pinned_bytes}}} ({bytes_text(buys[place].pinned_bytes)} of the host) '
        f"at {_slower(buys[place].time_us / order_us)} time"
        for place in places
    )
    lines = [
        f"host: expected at least {least.pinned_bytes} bytes ({bytes_text(least.pinned_bytes)}) of pinned memory, the least that was found "
        f"within {memory_bytes} bytes ({bytes_text(memory_bytes)}) of the device; got {host_bytes} bytes ({bytes_text(host_bytes)})",
        f"within that of the host the smallest peak that was found is {leanest.peak_bytes} bytes ({bytes_text(leanest.peak_bytes)}), "
        f"{_share(leanest.peak_bytes, leanest.eager_peak_bytes)}",
        f"what would help: {offers}; or {bytes_text(leanest.peak_bytes)} of the device; or a smaller batch{_accumulate(leanest)}{more}",
    ]
    if leanest.cost_report.stopped:
        lines.append(f"the search was ended early ({leanest.cost_report.stopped}): with more time it may find less")
    return BudgetError("\n".join(lines), leanest.peak_bytes, smallest_host_bytes=least.pinned_bytes)


def _own(peak: Snapshot) -> dict[Kind, int]:
    """Bytes of the caller's by kind, which no plan can let go of."""
    return {kind: nbytes for kind, nbytes in peak.by_kind.items() if kind.caller_owned}


def _made(peak: Snapshot) -> Snapshot:
    """The snapshot with what the step itself makes; with all where that is nothing."""
    own_tensors = tuple(tensor for tensor in peak.tensors if not tensor.kind.caller_owned)
    return replace(peak, tensors=own_tensors or peak.tensors)


def _offers(report: CostReport) -> str:
    """What was planned, as arguments: the least, the one in the middle of the frontier, and the one without recomputation."""
    points = report.frontier
    places = sorted({round(piece * (len(points) - 1) / (_OFFERED - 1)) for piece in range(_OFFERED)})
    offers = ((peak, us / report.order_us) for peak, us in (points[place] for place in places))
    return ", ".join(f"memory={peak} ({bytes_text(peak)}) at {_slower(ratio)} time" for peak, ratio in offers)


def _slower(ratio: float) -> str:
    """The time that is taken more, in percent; what rounds to nothing has no minus."""
    return f"{round(ratio - 1, 3) + 0.0:+.1%}"


def _share(nbytes: int, eager_bytes: int) -> str:
    return f"{nbytes / eager_bytes:.0%} of eager's {bytes_text(eager_bytes)}" if eager_bytes else "eager's own"


def _accumulate(plan: Plan) -> str:
    """Micro-batches are for training alone."""
    trains = any(value.storage.kind is Kind.GRADIENT for node in plan.graph.nodes for value in node.results)
    return ", or micro-batches (Training(accumulate=2)): lowtide.explain(...) says what these would do" if trains else ""
