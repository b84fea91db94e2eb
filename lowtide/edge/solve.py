"""Plans of a network in one space (least bytes) or several (least time within their sizes, or least bytes of one within a time).

One space: the order by `schedule`, the addresses by `placement`, each with its bound. Several: the programme of `search` by bytes alive,
in rounds of more and more width, first without moves, then with them. What it chooses gets addresses; where these do not fit,
it is asked again with that much less room. Its bound holds all the same, as bytes alive never exceed what addresses need.

Where there is no plan, `misfit` says why and what would fit, in the names of operators and spaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowtide.base.messages import bytes_text
from lowtide.cost.memory import simulate
from lowtide.edge.check import check
from lowtide.edge.cut_search import CutPart, CutSearch
from lowtide.edge.cuts import with_cuts
from lowtide.edge.graph import EdgeGraph
from lowtide.edge.plan import EdgePlan, Space
from lowtide.edge.problem import EdgeProblem
from lowtide.edge.residences import Choice, Laid, lay, operators_of, time_ps
from lowtide.edge.search import NEVER, Found, Programme
from lowtide.errors import BudgetError, FormatError
from lowtide.problems import Status
from lowtide.schedule import Auto, Schedule, schedule
from lowtide.schedule.cuts import lower_bound_bytes

_WIDTHS = (16, 256, 4096, 65536)
_ROUNDS = 8  # of asking again with less room, where addresses did not fit


@dataclass(frozen=True)
class EdgeEffort:
    """How far to search, the same on every machine."""

    max_steps: int = 3_000_000  # of the programme, with and without moves: ways to run an operator after a beginning
    max_orders: int = 40_000  # states of the search for an order in one space
    moves: bool = True  # whether blocks may move between spaces


@dataclass(frozen=True)
class EdgeAnswer:
    """What is known of a problem: a plan where one was found, and the bound either way."""

    plan: EdgePlan | None
    bound: int  # no plan takes less: NEVER where none fits
    status: Status


@dataclass(frozen=True)
class EdgeRequest:
    graph: EdgeGraph
    problem: EdgeProblem
    macs_per_s: float | None
    constants_bytes_per_s: float | None
    effort: EdgeEffort
    cuts: tuple[CutPart, ...] = ()  # in several spaces, of which some may be chosen
    most_extra_macs: int = 0

    @classmethod
    def of(
        cls,
        graph: EdgeGraph,
        spaces: Sequence[Space],
        *,
        macs_per_s: float | None = None,
        constants_bytes_per_s: float | None = None,
        dma: bool = False,
        constants: Space | None = None,
        effort: EdgeEffort | None = None,
    ) -> EdgeRequest:
        """Spaces are sorted from the fastest to the slowest. Raises FormatError as `EdgeProblem.of` does."""
        fastest = sorted(spaces, key=lambda memory: -_speed(memory)) if all(isinstance(each, Space) for each in spaces) else spaces
        if isinstance(constants, Space):
            constants_bytes_per_s = constants.read_bytes_per_s
        problem = EdgeProblem.of(
            graph, fastest, macs_per_s=macs_per_s, constants_bytes_per_s=constants_bytes_per_s, dma=dma, constants=constants
        )
        return cls(graph, problem, macs_per_s, constants_bytes_per_s, effort or EdgeEffort())

    @property
    def room_bytes(self) -> tuple[int, ...]:
        return tuple(memory.room_bytes for memory in self.problem.spaces)

    def plan(self, choice: Choice, laid: Laid, bound: int, least: int | None, room_bytes: Sequence[int]) -> EdgePlan:
        """A plan that went through the check; the room that was asked for is its spaces' capacity."""
        spaces = tuple(
            memory if room == memory.room_bytes else replace(memory, capacity_bytes=room if 0 < room < 2**61 else None)
            for memory, room in zip(self.problem.spaces, room_bytes, strict=True)
        )
        rates = [(memory.read_bytes_per_s, memory.write_bytes_per_s) for at, memory in enumerate(spaces) if at != self.problem.flash]
        known = all(None not in each for each in rates)
        plan = EdgePlan(
            self.graph, spaces, operators_of(self.problem, choice), laid.blocks, laid.moves,
            macs_per_s=self.macs_per_s, constants_bytes_per_s=self.constants_bytes_per_s, dma=self.problem.dma,
            time_ps=time_ps(self.problem, choice) if known else None, least=least,
        )  # fmt: skip
        bound = min(bound, plan.value)
        plan = replace(plan, bound=bound, status=Status.OPTIMAL if bound == plan.value else Status.FEASIBLE)
        check(plan)
        return plan


def _speed(memory: Space) -> float:
    """How fast a space is: bytes read and written in a second, one after the other."""
    if memory.read_bytes_per_s is None or memory.write_bytes_per_s is None:
        return 0.0
    return 1 / (1 / memory.read_bytes_per_s + 1 / memory.write_bytes_per_s)


def solve(request: EdgeRequest) -> EdgeAnswer:
    """In one space the plan of least bytes, in several that of least time within their sizes."""
    if len(request.problem.spaces) == 1:
        return _in_one_space(request)
    return fastest(request, request.room_bytes)


def with_cut_parts(request: EdgeRequest, extra_macs: float | None) -> EdgeRequest:
    """The request with all that may be cut: within this share of multiplications done again, None: as many as time allows.

    Raises FormatError for a network whose operators wait for others than those of which they read.
    """
    if any(node.after for node in request.graph.nodes):
        raise FormatError("cut: expected a network whose operators wait for nothing but what they read")
    once = sum(node.macs for node in request.graph.nodes)
    most = 2**60 if extra_macs is None else min(2**60, int(once * extra_macs))
    if len(request.problem.spaces) == 1:
        return request
    cuts = CutSearch(request.graph, request.problem).in_time(request.macs_per_s, request.constants_bytes_per_s, most)
    return replace(request, cuts=tuple(cuts), most_extra_macs=most)


def solve_cut(request: EdgeRequest, extra_macs: float | None) -> EdgeAnswer:
    """In one space the plan of least bytes whose cuts do at most this share of multiplications again; in several that of least time.

    request: as `with_cut_parts` gives it. None: in one space within its size the plan of fewest multiplications. The bound of one space is
    of all cuts that do no more of them than the plan's.
    """
    if len(request.problem.spaces) > 1:
        return fastest(request, request.room_bytes)
    search, room = CutSearch(request.graph, request.problem), request.room_bytes[0]
    whole = _in_one_space(request)
    answer, macs = whole, search.macs
    if whole.plan is None or extra_macs is not None:
        answer, macs = _in_slices(request, search, extra_macs)
    if answer.plan is None or (whole.plan is not None and whole.plan.value <= answer.plan.value):
        answer, macs = whole, search.macs
    if extra_macs is not None:
        macs = int(search.macs * (1 + extra_macs))
    if answer.plan is None:
        bound = search.bound_bytes(2**62 if extra_macs is None else macs)
        return EdgeAnswer(None, bound, Status.INFEASIBLE if bound > room else Status.UNKNOWN)
    bound = min(search.bound_bytes(macs), answer.plan.value)
    plan = replace(answer.plan, bound=bound, status=Status.OPTIMAL if bound == answer.plan.value else Status.FEASIBLE)
    check(plan)
    return EdgeAnswer(plan, bound, plan.status)


def _in_slices(request: EdgeRequest, search: CutSearch, extra_macs: float | None) -> tuple[EdgeAnswer, int]:
    """The best cuts by bytes alive, with addresses, and their multiplications; where addresses do not fit, others in less room."""
    within, answer = request.room_bytes[0], EdgeAnswer(None, 0, Status.UNKNOWN)
    for _ in range(_ROUNDS if extra_macs is None else 1):
        partition = search.of_least_macs(within) if extra_macs is None else search.of_least_bytes(extra_macs)
        if partition is None:
            break
        graph = with_cuts(request.graph, partition.cuts, request.problem.spaces[0].align_bytes)
        problem = EdgeProblem.of(
            graph, request.problem.spaces, macs_per_s=request.macs_per_s, constants_bytes_per_s=request.constants_bytes_per_s
        )
        answer = _in_one_space(replace(request, graph=graph, problem=problem))
        if answer.plan is not None:
            return answer, partition.macs
        within = partition.needs_bytes - 1
    return answer, search.macs


def _in_one_space(request: EdgeRequest) -> EdgeAnswer:
    problem, room = request.problem, request.room_bytes
    answer = _ordered(request, 0)
    choice = _choice(problem, answer, 0)
    laid = lay(problem, choice, room)
    if laid.excess_bytes[0]:
        proven = answer.lower_bound_bytes > room[0]
        return EdgeAnswer(None, answer.lower_bound_bytes, Status.INFEASIBLE if proven else Status.UNKNOWN)
    plan = request.plan(choice, laid, answer.lower_bound_bytes, 0, room)
    return EdgeAnswer(plan, plan.bound, plan.status)


def _ordered(request: EdgeRequest, space: int) -> Schedule:
    return schedule(request.problem.order_problem(space), Auto(max_states=request.effort.max_orders))


def _choice(problem: EdgeProblem, answer: Schedule, space: int) -> Choice:
    """All in one space, in the order of least bytes."""
    reuses = simulate(problem.order_problem(space), answer.order).reuses.tolist()
    taken = {index: task.takes[slot] for index, (task, slot) in enumerate(zip(problem.tasks, reuses, strict=True)) if slot >= 0}
    return Choice(answer.order, dict.fromkeys(range(len(problem.size_bytes)), space), taken)


def fastest(request: EdgeRequest, room_bytes: Sequence[int], *, limit_ps: int = NEVER, enough_ps: int = 0) -> EdgeAnswer:
    """The plan of least time in spaces of so much room; one that takes `limit_ps` or more is none, one of `enough_ps` is good enough."""
    room, bound = list(room_bytes), -1
    for _ in range(_ROUNDS):
        answer = _chosen(request, room, limit_ps, enough_ps)
        bound = answer.bound_ps if bound < 0 else bound  # of all the room
        if answer.choice is None:
            break
        cut, choice = _in_cuts(request, answer)
        laid = lay(cut.problem, choice, room_bytes)
        if not any(laid.excess_bytes):
            plan = cut.plan(choice, laid, bound, None, room_bytes)
            return EdgeAnswer(plan, plan.bound, plan.status)
        room = [most - excess if excess else most for most, excess in zip(room, laid.excess_bytes, strict=True)]
        if min(room) < 0:
            break
    return EdgeAnswer(None, bound, Status.INFEASIBLE if bound >= limit_ps else Status.UNKNOWN)


def _in_cuts(request: EdgeRequest, answer: Found) -> tuple[EdgeRequest, Choice]:
    """The request of the network whose cuts were chosen, and the choice by its tasks and storages."""
    choice, problem = answer.choice, request.problem
    if choice is None or not answer.cuts:
        return request, choice or Choice((), {}, {})
    graph = with_cuts(request.graph, [part.cut for part in answer.cuts], max(memory.align_bytes for memory in problem.spaces))
    number = _numbers(request.graph, answer.cuts)
    cut = EdgeProblem.of(
        graph,
        [memory for at, memory in enumerate(problem.spaces) if at != problem.flash],
        macs_per_s=request.macs_per_s,
        constants_bytes_per_s=request.constants_bytes_per_s,
        dma=problem.dma,
        constants=problem.spaces[problem.flash] if problem.flash >= 0 else None,
        weights=[tuple(number[at] for at in problem.tensors[storage]) for storage in sorted(problem.constants)],
    )
    storage_of = {tensor: storage for storage, tensors in enumerate(cut.tensors) for tensor in tensors}
    storage = {one: storage_of[number[at]] for one, tensors in enumerate(problem.tensors) for at in tensors if at in number}
    node = {task: at for at, task in enumerate(sorted(operators_of(problem, choice)))}  # of a cut by its last task
    begun = {task.makes[0]: at for at, task in enumerate(cut.tasks) if at >= cut.operators}
    node |= {task: begun[storage[problem.tasks[task].makes[0]]] for task in choice.order if task >= problem.operators}
    moved = Choice(
        tuple(node[task] for task in choice.order),
        {storage[each]: space for each, space in choice.space_of.items()},
        {node[task]: storage[each] for task, each in choice.taken.items()},
        tuple((step, storage[each], space) for step, each, space in choice.moves),
        {node[task]: space for task, space in choice.rings.items()},
    )
    return replace(request, graph=graph, problem=cut, cuts=()), moved


def _numbers(graph: EdgeGraph, cuts: Sequence[CutPart]) -> dict[int, int]:
    """By tensor that stays its number in the network that is cut."""
    inner = {at for part in cuts for node in graph.nodes[part.first : part.end] for at in node.outputs}
    inner -= {graph.nodes[part.end - 1].outputs[0] for part in cuts}
    used = {*graph.inputs, *graph.outputs, *(at for node in graph.nodes for at in (*node.inputs, *node.outputs) if at >= 0)}
    return {at: new for new, at in enumerate(sorted(used - inner))}


def _chosen(request: EdgeRequest, room: Sequence[int], limit_ps: int, enough_ps: int) -> Found:
    """The best choice by bytes alive, first without cuts and moves, then with each; none where nothing takes less than `limit_ps`."""
    best = Found(None, (), (), limit_ps, 0)
    orders = [_ordered(request, len(room) - 1).order]
    if request.cuts:
        best = replace(_searched(request, room, best, orders, enough_ps, cuts=False), bound_ps=0)
        orders.append(tuple(range(len(request.problem.tasks))))
    return _searched(request, room, best, orders, enough_ps, cuts=True)


def _searched(
    request: EdgeRequest, room: Sequence[int], best: Found, orders: Sequence[Sequence[int]], enough_ps: int, *, cuts: bool
) -> Found:
    """In rounds of more and more width, from the best that is known: with orders that are given, then with any."""
    effort, used, bound = request.effort, request.cuts if cuts else (), 0
    for moves in (False, True) if effort.moves else (False,):
        programme, left, bound = Programme(request.problem, room, moves=moves, cuts=used, known_ps=best.time_ps), effort.max_steps, 0
        rounds = [*((256, order) for order in orders), (1024, ()), *((width, None) for width in _WIDTHS)]
        for width, fixed in rounds:
            bound = max(bound, min(programme.root_bound_ps, best.time_ps))
            if programme.root_bound_ps >= best.time_ps or best.time_ps <= enough_ps:
                return replace(best, bound_ps=bound)
            if fixed == () and not best.order:
                continue
            before = programme.steps
            order = best.order if fixed == () else fixed
            answer = programme.find(best.time_ps, width=width, max_steps=left, most_extra_macs=request.most_extra_macs, order=order)
            left -= programme.steps - before
            if fixed is None:
                bound = max(bound, answer.bound_ps)
            if answer.choice is not None:
                best = answer
                if used:
                    programme = Programme(request.problem, room, moves=moves, cuts=used, known_ps=best.time_ps)
            bound = min(bound, best.time_ps)
            if bound == best.time_ps or left <= 0:
                break
    return replace(best, bound_ps=bound)


def least_bytes(request: EdgeRequest, space: int, within_ps: int | None = None) -> EdgeAnswer:
    """The least bytes of one space with which the whole takes no longer than `within_ps`: a search by halves, as more room never hurts.

    No space gets more than its size. Raises nothing: an answer without a plan says whether that is proven.
    """
    align = request.problem.spaces[space].align_bytes
    within = NEVER - 1 if within_ps is None else within_ps
    most = list(request.room_bytes)

    def answer_in(room_bytes: int) -> EdgeAnswer:
        room = [room_bytes if index == space else each for index, each in enumerate(most)]
        return fastest(request, room, limit_ps=within + 1, enough_ps=within)

    answer = answer_in(most[space])
    if answer.plan is None:
        return answer
    best, proven, low, high = answer.plan, 0, 0, answer.plan.arena_bytes[space] // align  # in multiples of the alignment
    while low < high:
        middle = (low + high) // 2
        answer = answer_in(middle * align)
        if answer.plan is not None:
            best, high = answer.plan, answer.plan.arena_bytes[space] // align
        else:
            low = middle + 1
            proven = low if answer.status is Status.INFEASIBLE else proven
    bound = proven * align
    if bound < best.arena_bytes[space]:  # a search that ended early may have passed by what one for time finds
        faster = fastest(request, request.room_bytes, limit_ps=within + 1).plan
        best = best if faster is None else min(best, faster, key=lambda plan: plan.arena_bytes[space])
    used = best.arena_bytes[space]
    memory = replace(best.spaces[space], capacity_bytes=used or None)
    spaces = (*best.spaces[:space], memory, *best.spaces[space + 1 :])
    plan = replace(best, spaces=spaces, least=space, bound=bound, status=Status.OPTIMAL if bound == used else Status.FEASIBLE)
    check(plan)
    return EdgeAnswer(plan, plan.bound, plan.status)


def misfit(request: EdgeRequest, answer: EdgeAnswer) -> BudgetError:
    """The error for a request to which there was no plan: what is short, by how much, and sizes that were really planned."""
    problem = request.problem
    total_bytes = sum(memory.room_bytes for space, memory in enumerate(problem.spaces) if space != problem.flash)
    least = _least_alive_bytes(problem)
    why = _operator(request) or _alive(problem, least, total_bytes)
    would = _would(request)
    proven = "" if answer.status is Status.INFEASIBLE else " (not proven)"
    text = f"{request.graph.name} does not fit in {_spaces(problem)}{proven}: {why}{would}"
    return BudgetError(text, least, searched=True)


def of_any_size(request: EdgeRequest, space: int) -> EdgeRequest:
    spaces = tuple(replace(memory, capacity_bytes=None) if at == space else memory for at, memory in enumerate(request.problem.spaces))
    return replace(request, problem=replace(request.problem, spaces=spaces))


def _spaces(problem: EdgeProblem) -> str:
    sizes = [(each.name, each.capacity_bytes) for each in problem.spaces]
    return " and ".join(f"{name}={'any' if nbytes is None else bytes_text(nbytes)}" for name, nbytes in sizes)


def _least_alive_bytes(problem: EdgeProblem) -> int:
    """No order has fewer bytes alive at its peak, whatever lies where. Weights may all lie in flash."""
    problem = _without_weights(problem)
    finest = min(range(len(problem.spaces)), key=lambda space: problem.spaces[space].align_bytes)
    return int(lower_bound_bytes(problem.order_problem(finest)))


def _without_weights(problem: EdgeProblem) -> EdgeProblem:
    return replace(problem, size_bytes=tuple(0 if at in problem.constants else size for at, size in enumerate(problem.size_bytes)))


def _operator(request: EdgeRequest) -> str:
    """The first operator that no choice of spaces holds, with what is alive beside it; without weights first, as flash holds no others."""
    problem, room = request.problem, request.room_bytes
    in_ram = tuple(0 if space == problem.flash else each for space, each in enumerate(room))
    return (_too_large(request, _without_weights(problem), in_ram) if problem.flash >= 0 else "") or _too_large(request, problem, room)


def _too_large(request: EdgeRequest, problem: EdgeProblem, room_bytes: Sequence[int]) -> str:
    graph, programme = request.graph, Programme(problem, room_bytes, moves=False)
    for index, free_ps in enumerate(programme.free_ps):
        if free_ps < NEVER:
            continue
        task = problem.tasks[index]
        own = [each for each in {*task.reads, *task.makes} if problem.size_bytes[each]]
        own.sort(key=lambda storage: (-problem.size_bytes[storage], storage))
        parts = [f"{graph.tensors[problem.tensors[each][0]].name} of {bytes_text(problem.size_bytes[each])}" for each in own[:4]]
        parts += [f"a workspace of {bytes_text(task.workspace_bytes)}"] if task.workspace_bytes else []
        beside = problem.beside_bytes(task, index, index + 1)
        rest = f", and {bytes_text(beside)} are alive beside it in every order" if beside else ""
        largest = max(room_bytes)
        alone = own and problem.size_bytes[own[0]] > largest
        but = f" but {problem.spaces[problem.flash].name}" if problem.flash >= 0 and not room_bytes[problem.flash] else ""
        short = f"the largest space has {bytes_text(largest)}" if alone else f"all spaces{but} have {bytes_text(sum(room_bytes))}"
        return f"{graph.nodes[index].kind} {task.name} needs {', '.join(parts) or 'nothing'} at once{rest}; {short}"
    return ""


def _alive(problem: EdgeProblem, least: int, total_bytes: int) -> str:
    if least > total_bytes:
        return f"in every order {bytes_text(least)} are alive at once, {bytes_text(least - total_bytes)} more than there are"
    return f"in every order at least {bytes_text(least)} are alive at once, and no way to put them into these spaces was found"


def _would(request: EdgeRequest) -> str:
    """Spaces that would be large enough, each alone with the others as they are: only sizes for which there is a plan."""
    enough = []
    for space, memory in enumerate(request.problem.spaces):
        if memory.capacity_bytes is None:
            continue
        plan = _enough(request, space)
        if plan is not None:
            enough.append(f"{memory.name}={_exact(plan)}")
    return f"; it would fit with {' or with '.join(enough)}" if enough else "; no size of one space alone is enough"


def _enough(request: EdgeRequest, space: int) -> int | None:
    problem = request.problem
    quick = replace(request, effort=replace(request.effort, moves=False, max_steps=request.effort.max_steps // 10))
    alone = len(problem.spaces) == 1
    answer = solve(of_any_size(request, space)) if alone else least_bytes(of_any_size(quick, space), space)
    return None if answer.plan is None else answer.plan.arena_bytes[space]


def _exact(nbytes: int) -> str:
    """A size that is enough, as the command line takes it."""
    return f"{nbytes // 1024}KiB" if nbytes % 1024 == 0 else f"{-(-nbytes // 1024)}KiB ({nbytes:,} bytes)"
