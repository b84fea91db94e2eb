"""Why a network does not fit, and what would: said in the names of its operators and spaces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lowtide.base.messages import bytes_text
from lowtide.edge.problem import EdgeProblem
from lowtide.edge.search import NEVER, Programme
from lowtide.edge.solve import EdgeAnswer, EdgeRequest, least_bytes, solve
from lowtide.errors import BudgetError
from lowtide.problems.status import Status
from lowtide.schedule.cuts import lower_bound_bytes


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
    """The request as if this space had no size."""
    spaces = tuple(replace(memory, capacity_bytes=None) if at == space else memory for at, memory in enumerate(request.problem.spaces))
    return replace(request, problem=replace(request.problem, spaces=spaces))


def _spaces(problem: EdgeProblem) -> str:
    return " and ".join(f"{memory.name}={_size(memory.capacity_bytes)}" for memory in problem.spaces)


def _size(nbytes: int | None) -> str:
    return "any" if nbytes is None else bytes_text(nbytes)


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
