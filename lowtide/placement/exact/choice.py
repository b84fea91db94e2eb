"""Where the exact placer branches: on which buffer comes next in one section, or that none comes at its floor.

In a section let `v` be the lowest floor of a buffer not placed. Of those with this floor at most one lies at `v`, and all others of the
section above it; or none does, and each rests on another buffer, hence at or above its *support*. These cases exclude each other and
leave nothing out, provided that under none of the candidates another buffer would still fit. The section with the lowest floor of all
has this property, others may: the search takes the one with the fewest cases, as one without any is a dead end and one with a single
case no choice. Sections that failed often are taken earlier, by the root of how often.
"""

from __future__ import annotations

from typing import Any

from lowtide.base.kernels import kernel
from lowtide.placement.exact.bounds import Rules
from lowtide.placement.exact.floors import NEVER, FloorWalk, raise_floor
from lowtide.placement.exact.sections import SectionNet


@kernel
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


@kernel
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


@kernel
def _support(net: SectionNet, walk: FloorWalk, buffer: Any) -> Any:
    support = NEVER
    for at in range(net.meet_ptr[buffer], net.meet_ptr[buffer + 1]):
        other = net.meet_ids[at]
        if not walk.placed[other]:
            support = min(support, walk.floor[other] + net.size[other])
    return support


@kernel
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


@kernel
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
