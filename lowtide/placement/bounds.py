"""What the exact placer concludes from sections without trying: that a state is dead, or that a buffer lies higher than it could.

In a section the buffers not placed lie one above the other, each at its floor or above: put in order of their floors, and each as low as
floors and those before allow, the last one's end is the least that the section needs. That is the makespan of jobs with release dates
on one machine, which this order makes as short as it can be.

Where the exact placer branches: on which buffer comes next in one section, or that none comes at its floor.

In a section let `v` be the lowest floor of a buffer not placed. Of those with this floor at most one lies at `v`, and all others of the
section above it; or none does, and each rests on another buffer, hence at or above its *support*. These cases exclude each other and
leave nothing out, provided that under none of the candidates another buffer would still fit. The section with the lowest floor of all
has this property, others may: the search takes the one with the fewest cases, as one without any is a dead end and one with a single
case no choice. Sections that failed often are taken earlier, by the root of how often.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lowtide.base.kernels import kernel
from lowtide.placement.floors import DEAD, LEFT, NEVER, RIGHT, TRAIL, FloorWalk, quiet, raise_floor
from lowtide.placement.sections import SectionNet


class Rules(NamedTuple):
    """Which techniques are on, each 0 or 1, and how ties are broken."""

    canonical: Any
    inference: Any
    lifting: Any
    decomposition: Any
    dynamic: Any
    symmetry: Any
    memory: Any
    weighted: Any  # prefer sections that failed often
    filling: Any  # who is tried first, before rank: 0 nobody, 1 who leaves the fewest gaps, 2 who closes the most sections without one
    rank: Any  # [n] of buffers, the lowest first


@kernel(inner=True, borrows=True)
def fits(net: SectionNet, walk: FloorWalk, rules: Rules, capacity: Any, left: Any, right: Any) -> Any:
    """Whether the sections of `[left, right)` where floors rose may still fit."""
    if walk.registers[DEAD]:
        return False
    for section in range(max(left, walk.registers[LEFT]), min(right, walk.registers[RIGHT])):
        if walk.count[section] == 0:
            continue
        lowest, highest, end = NEVER, 0, 0
        for at in range(net.member_ptr[section], net.member_ptr[section] + walk.count[section]):
            buffer = walk.member[at]
            floor = walk.floor[buffer]
            lowest, highest, end = min(lowest, floor), max(highest, floor), max(end, floor + net.size[buffer])
        if rules.inference and highest + walk.total[section] > capacity and end <= capacity:
            items, count = walk.items, 0  # a call here, with all these arrays, would take longer than the work
            for at in range(net.member_ptr[section], net.member_ptr[section] + walk.count[section]):
                buffer = walk.member[at]
                floor, place = walk.floor[buffer], count
                while place > 0 and items[place - 1, 0] > floor:
                    items[place, 0], items[place, 1] = items[place - 1, 0], items[place - 1, 1]
                    place -= 1
                items[place, 0], items[place, 1] = floor, net.size[buffer]
                count += 1
            end = lowest
            for place in range(count):
                end = max(end, items[place, 0]) + items[place, 1]
        if end > capacity:
            walk.weight[section] += 1.0
            return False
    return True


@kernel(inner=True, borrows=True)
def conclude(net: SectionNet, walk: FloorWalk, rules: Rules, capacity: Any, left: Any, right: Any) -> Any:
    """Brings all that follows from the floors up to date in `[left, right)`, lifting buffers; False where the state is dead."""
    changed_left, changed_right = left, right
    while True:
        _look_at_sections(net, walk, changed_left, changed_right)
        quiet(walk)
        if not _look_beneath_buffers(net, walk, rules, capacity, left, changed_left, changed_right):
            return not walk.registers[DEAD]
        if not fits(net, walk, rules, capacity, left, right):
            return False
        changed_left, changed_right = walk.registers[LEFT], walk.registers[RIGHT]


@kernel(inner=True, borrows=True)
def _look_at_sections(net: SectionNet, walk: FloorWalk, left: Any, right: Any) -> None:
    for section in range(left, right):
        lowest, top, second, topper = NEVER, NEVER, NEVER, -1
        for at in range(net.member_ptr[section], net.member_ptr[section] + walk.count[section]):
            buffer = walk.member[at]
            floor = walk.floor[buffer]
            end = floor + net.size[buffer]
            lowest = min(lowest, floor)
            if end < top:
                second, top, topper = top, end, buffer
            elif end < second:
                second = end
        walk.lowest[section], walk.top[section], walk.second[section], walk.topper[section] = lowest, top, second, topper


@kernel(inner=True, borrows=True)
def _look_beneath_buffers(net: SectionNet, walk: FloorWalk, rules: Rules, capacity: Any, begin: Any, left: Any, right: Any) -> Any:
    """Whether some buffer was lifted, of those from section `begin` on that live in some of `[left, right)`.

    A buffer that nothing fits beneath has all others above it at its floor; where they are too many, it rests on one of them instead.
    """
    lifted = False
    for buffer in range(net.first[begin], net.first[right]):
        if walk.placed[buffer] or net.high[buffer] <= left:
            continue
        support, reach = NEVER, 0
        for section in range(net.low[buffer], net.high[buffer]):
            end = walk.second[section] if walk.topper[section] == buffer else walk.top[section]
            support, reach = min(support, end), max(reach, walk.total[section])
        walk.support[buffer] = support
        walk.stands[buffer] = support > walk.floor[buffer]
        holds = walk.floor[buffer] + reach <= capacity
        twin = net.twin[buffer]
        walk.may[buffer] = (holds or not rules.inference) and (not rules.symmetry or twin < 0 or walk.placed[twin] == 1)
        if not rules.lifting or holds or not walk.stands[buffer]:
            continue
        if support + net.size[buffer] > capacity:
            walk.registers[DEAD] = 1
            return False
        if walk.registers[TRAIL] + 2 * len(net.size) <= len(walk.trail):  # without room to note it: not lifting is right too
            raise_floor(net, walk, buffer, support)
            lifted = True
    return lifted


@kernel(inner=True, borrows=True)
def choose(net: SectionNet, walk: FloorWalk, rules: Rules, capacity: Any, left: Any, right: Any) -> Any:
    """The section of `[left, right)` to branch on, and whether "none at its floor" is a case there."""
    best, best_cost, best_tie, best_none = -1, 0.0, 0, False
    for section in range(left, right):
        if walk.count[section] == 0:
            continue
        lowest, cases, least, stand = walk.lowest[section], 0, NEVER, True
        for at in range(net.member_ptr[section], net.member_ptr[section] + walk.count[section]):
            buffer = walk.member[at]
            floor = walk.floor[buffer]
            if floor == lowest:
                if not walk.stands[buffer]:
                    stand = False
                    break
                cases += walk.may[buffer]
                floor = walk.support[buffer] if rules.canonical else lowest + 1
            least = min(least, floor)
        if not stand:
            continue
        none = least + (walk.total[section] if rules.inference else 0) <= capacity
        cost, tie = float(cases + none), capacity - lowest - walk.total[section]
        if not rules.dynamic:
            cost = float(lowest)
        elif rules.weighted:
            cost, tie = cost / walk.weight[section] ** 0.5, 0
        if best < 0 or cost < best_cost or (cost == best_cost and tie < best_tie):
            best, best_cost, best_tie, best_none = section, cost, tie, none
    return best, best_none


@kernel(inner=True, borrows=True)
def put_none(net: SectionNet, walk: FloorWalk, rules: Rules, section: Any) -> None:
    """No buffer of the section lies at its lowest floor: those that could rest on others that are not placed."""
    lowest = NEVER
    for at in range(net.member_ptr[section], net.member_ptr[section] + walk.count[section]):
        buffer = walk.member[at]
        lowest = min(lowest, walk.floor[buffer])
    for at in range(net.member_ptr[section], net.member_ptr[section] + walk.count[section]):
        buffer = walk.member[at]
        if walk.floor[buffer] == lowest:
            raise_floor(net, walk, buffer, _support(net, walk, buffer) if rules.canonical else lowest + 1)


@kernel(inner=True, borrows=True)
def _support(net: SectionNet, walk: FloorWalk, buffer: Any) -> Any:
    support = NEVER
    for at in range(net.meet_ptr[buffer], net.meet_ptr[buffer + 1]):
        other = net.meet_ids[at]
        if not walk.placed[other]:
            support = min(support, walk.floor[other] + net.size[other])
    return support


@kernel(inner=True, borrows=True)
def candidates(net: SectionNet, walk: FloorWalk, rules: Rules, section: Any, none: Any, room: Any) -> Any:
    """Writes the cases into `room`, the first to try last, and returns how many: a buffer's number, or -1 for "none", tried after all."""
    count = 0
    if none:
        room[0] = -1
        count = 1
    for at in range(net.member_ptr[section], net.member_ptr[section] + walk.count[section]):
        buffer = walk.member[at]
        if walk.floor[buffer] != walk.lowest[section] or not walk.may[buffer]:
            continue
        walk.cost[buffer] = rules.rank[buffer] + len(net.size) * _waste(net, walk, rules, buffer)
        place = count
        while place > 0 and room[place - 1] >= 0 and walk.cost[room[place - 1]] < walk.cost[buffer]:
            room[place] = room[place - 1]
            place -= 1
        room[place] = buffer
        count += 1
    return count


@kernel(inner=True, borrows=True)
def _waste(net: SectionNet, walk: FloorWalk, rules: Rules, buffer: Any) -> Any:
    """In how many sections the buffer at its floor leaves a gap; or, filling by 2, in how many of all it does not close one."""
    if not rules.filling:
        return 0
    gaps = 0
    for section in range(net.low[buffer], net.high[buffer]):
        gaps += walk.floor[buffer] > walk.lowest[section]
    if rules.filling == 1:
        return gaps
    return len(net.member_ptr) - (net.high[buffer] - net.low[buffer]) + gaps
