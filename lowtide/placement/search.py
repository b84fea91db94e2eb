"""The question behind the exact placer: is there a placement within a capacity?

Depth first. Where the buffers not placed fall apart into components that share no section, these are searched one after the other, the one
with the fewest buffers first; a component that fails takes the search back to the branching that made it, past all those solved since.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel
from lowtide.placement.bounds import Rules, candidates, choose, conclude, fits, put_none
from lowtide.placement.floors import LEFT, RIGHT, TRAIL, FloorWalk, SeenStates, is_seen, put, quiet, see, state_of, take_back
from lowtide.placement.sections import SectionNet

YES, NO, PAUSED, FULL = range(4)  # what `search` came back with; FULL: the stack, the trail or the table wants more room
DEPTH, ENTERING, COMPONENT, COMPONENTS, NODES, FAILURES = range(6)  # registers of a search
_FROM, _TO, _MADE_AT, _NEXT = range(4)  # columns of a component
_OWN, _PARTS, _MARK, _CASES, _TRIED, _SECTION = range(6)  # columns of a branching


class PlaceStack(NamedTuple):
    """Branchings from the start to where a search stands, and the components still to be solved."""

    branching: Any  # [depth, 6] its component, all and the trail when it was made, the end of its cases, those not yet tried, its section
    state: Any  # [depth, 2] what its component is known by
    case: Any  # [c] cases of all branchings, one after the other
    component: Any  # [p, 4] its sections [left, right), the branching that made it, the component to solve next or -1
    registers: Any  # [6] int64: see DEPTH, ...


def new_stack(net: SectionNet) -> PlaceStack:
    """A search that has not begun: all sections are one component."""
    n, m = len(net.size), len(net.member_ptr) - 1
    stack = PlaceStack(
        np.zeros((n + 8, 6), np.int64),
        np.zeros((n + 8, 2), np.uint64),
        np.zeros(4 * n + 8, np.int64),
        np.zeros((2 * (n + m) + 8, 4), np.int64),
        np.zeros(6, np.int64),
    )
    stack.component[0] = 0, m, -1, -1
    stack.registers[ENTERING] = stack.registers[COMPONENTS] = 1
    return stack


def grown(walk: FloorWalk, stack: PlaceStack) -> tuple[FloorWalk, PlaceStack]:
    room = {name: _doubled(getattr(stack, name)) for name in ("branching", "state", "case", "component")}
    return walk._replace(trail=_doubled(walk.trail)), stack._replace(**room)


def _doubled(array: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([array, np.zeros_like(array)])


@kernel(borrows=True)
def search(
    net: SectionNet, walk: FloorWalk, stack: PlaceStack, seen: SeenStates, rules: Rules, capacity: Any, nodes: Any, may_grow: Any
) -> Any:
    """Goes on until there is an answer, `nodes` were entered in all, or something wants more room (the table only if it `may_grow`).

    With YES, `walk.floor` are offsets within the capacity. With NO, there are none.
    """
    registers = stack.registers
    while True:
        if registers[ENTERING]:
            if _is_full(net, walk, stack) or (may_grow and 2 * seen.count[0] > len(seen.words)):
                return FULL
            if registers[NODES] >= nodes:
                return PAUSED
            entered = _enter(net, walk, stack, seen, rules, capacity)
            if not entered and not _go_back(net, walk, stack, stack.component[registers[COMPONENT], _MADE_AT]):
                return NO
        depth = registers[DEPTH]
        branching = stack.branching[depth]
        if branching[_TRIED] == _first_case(stack, depth):
            if rules.memory:
                see(seen, stack.state[depth, 0], stack.state[depth, 1])
            if not _go_back(net, walk, stack, stack.component[branching[_OWN], _MADE_AT]):
                return NO
            continue
        take_back(net, walk, branching[_MARK])
        if not _try(net, walk, stack, rules, capacity):
            registers[FAILURES] += 1
        elif not _next_component(net, walk, stack, rules):
            return YES


@kernel(inner=True, borrows=True)
def _is_full(net: SectionNet, walk: FloorWalk, stack: PlaceStack) -> Any:
    """Whether one more branching might not find room."""
    n, m, depth = len(net.size), len(net.member_ptr) - 1, stack.registers[DEPTH]
    if depth + 2 > len(stack.branching) or walk.registers[TRAIL] + 4 * n + 8 > len(walk.trail):
        return True
    return _first_case(stack, depth) + n + 1 > len(stack.case) or stack.registers[COMPONENTS] + m + 1 > len(stack.component)


@kernel(inner=True, borrows=True)
def _first_case(stack: PlaceStack, depth: Any) -> Any:
    return stack.branching[depth - 1, _CASES] if depth > 0 else 0


@kernel(inner=True, borrows=True)
def _go_back(net: SectionNet, walk: FloorWalk, stack: PlaceStack, depth: Any) -> Any:
    """To the branching that made a component which failed; False where there is none, and the whole problem failed."""
    if depth < 0:
        return False
    stack.registers[DEPTH] = depth
    take_back(net, walk, stack.branching[depth, _MARK])
    return True


@kernel(inner=True, borrows=True)
def _enter(net: SectionNet, walk: FloorWalk, stack: PlaceStack, seen: SeenStates, rules: Rules, capacity: Any) -> Any:
    """Makes a branching of the component whose turn it is; False where it is dead."""
    registers = stack.registers
    registers[NODES] += 1
    registers[ENTERING] = 0
    depth, own = registers[DEPTH], registers[COMPONENT]
    left, right = stack.component[own, _FROM], stack.component[own, _TO]
    if stack.component[own, _MADE_AT] < 0:  # the whole problem, of which nothing is known yet
        walk.registers[LEFT], walk.registers[RIGHT] = left, right
        if not fits(net, walk, rules, capacity, left, right):
            return False
    if not conclude(net, walk, rules, capacity, left, right):
        registers[FAILURES] += 1
        return False
    if rules.memory:
        one, two = state_of(net, walk, left, right)
        if is_seen(seen, one, two):
            return False
        stack.state[depth, 0], stack.state[depth, 1] = one, two
    section, none = choose(net, walk, rules, capacity, left, right)
    begin = _first_case(stack, depth)
    end = begin + candidates(net, walk, rules, section, none, stack.case[begin:])
    branching = stack.branching[depth]
    branching[_OWN], branching[_PARTS], branching[_MARK] = own, registers[COMPONENTS], walk.registers[TRAIL]
    branching[_CASES], branching[_TRIED], branching[_SECTION] = end, end, section
    return True


@kernel(inner=True, borrows=True)
def _try(net: SectionNet, walk: FloorWalk, stack: PlaceStack, rules: Rules, capacity: Any) -> Any:
    """Takes the next case of the branching on top; False where it fails at once."""
    branching = stack.branching[stack.registers[DEPTH]]
    stack.registers[COMPONENTS] = branching[_PARTS]
    branching[_TRIED] -= 1
    quiet(walk)
    case = stack.case[branching[_TRIED]]
    if case >= 0:
        put(net, walk, case)
    else:
        put_none(net, walk, rules, branching[_SECTION])
    own = branching[_OWN]
    return fits(net, walk, rules, capacity, stack.component[own, _FROM], stack.component[own, _TO])


@kernel(inner=True, borrows=True)
def _next_component(net: SectionNet, walk: FloorWalk, stack: PlaceStack, rules: Rules) -> Any:
    """Splits what is left of the component on top, and turns to the first component to be solved; False where none is left."""
    registers = stack.registers
    depth, top = registers[DEPTH], registers[COMPONENTS]
    own = stack.branching[depth, _OWN]
    end = _split(net, walk, stack, rules, stack.component[own, _FROM], stack.component[own, _TO])
    turn = stack.component[own, _NEXT]
    for component in range(top, end):  # the last is solved first
        stack.component[component, _MADE_AT], stack.component[component, _NEXT] = depth, turn
        turn = component
    registers[COMPONENTS] = end
    if turn < 0:
        return False
    registers[COMPONENT], registers[DEPTH], registers[ENTERING] = turn, depth + 1, 1
    return True


@kernel(inner=True, borrows=True)
def _split(net: SectionNet, walk: FloorWalk, stack: PlaceStack, rules: Rules, left: Any, right: Any) -> Any:
    """Writes the components that `[left, right)` falls into after the others, those of most buffers first; returns where they end."""
    begin = top = stack.registers[COMPONENTS]
    start = -1
    for section in range(left, right + 1):
        ends = section == right or walk.count[section] == 0
        if start >= 0 and (ends or not _is_crossed(net, walk, section)) and (rules.decomposition or section == right):
            _insert(net, stack, begin, top, start, section)
            top += 1
            start = -1
        if start < 0 and not ends:
            start = section
    return top


@kernel(inner=True, borrows=True)
def _is_crossed(net: SectionNet, walk: FloorWalk, section: Any) -> Any:
    """Whether a buffer not placed lives in this section and in the one before."""
    least = section
    for at in range(net.member_ptr[section], net.member_ptr[section] + walk.count[section]):
        least = min(least, net.low[walk.member[at]])
    return least < section


@kernel(inner=True, borrows=True)
def _insert(net: SectionNet, stack: PlaceStack, begin: Any, place: Any, left: Any, right: Any) -> None:
    buffers = net.first[right] - net.first[left]
    while place > begin and net.first[stack.component[place - 1, _TO]] - net.first[stack.component[place - 1, _FROM]] < buffers:
        stack.component[place, _FROM], stack.component[place, _TO] = stack.component[place - 1, _FROM], stack.component[place - 1, _TO]
        place -= 1
    stack.component[place, _FROM], stack.component[place, _TO] = left, right
