"""Where the exact placer stands: floors of the buffers not yet placed, and what is known to fail from there.

A buffer's *floor* is an offset below which it cannot lie. Buffers are placed at their floors, and only where none that meets them would
still fit beneath: whatever comes later and meets them lies above. So what is placed need not be looked at again.

Whether a component fits within a capacity depends on nothing else; so what failed once fails again, however it is come by, and under every
smaller capacity too. A component is known by 128 bits, sums over its buffers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lowtide.base.kernels import kernel
from lowtide.placement.sections import SectionNet
from lowtide.problems.placement import FREE

TRAIL, DEAD, LEFT, RIGHT = range(4)  # registers of a walk
NEVER = 1 << 62
_PLACED = -1  # in the trail, in place of a floor


class FloorWalk(NamedTuple):
    """Floors and what follows from them; written to."""

    floor: Any  # [n] of buffers not placed; the offset of those that are
    placed: Any  # [n] 0 or 1
    count: Any  # [m] buffers not placed, by section
    member: Any  # rows as the net's: in each those not placed come first, the others in the order in which they were placed, last first
    seat: Any  # where in `member` each buffer is in each section of its life, by buffer
    total: Any  # [m] their sizes
    lowest: Any  # [m] the lowest floor of any of them
    top: Any  # [m] the lowest end that any of them can have
    topper: Any  # [m] which one that is
    second: Any  # [m] the same without that one
    support: Any  # [n] the lowest end of another buffer not placed that meets this one
    stands: Any  # [n] 0 or 1: no other would fit beneath the buffer at its floor
    may: Any  # [n] 0 or 1: it may lie there for all that is known at once
    cost: Any  # [n] candidates are tried in this order
    weight: Any  # [m] float: how often a section failed
    items: Any  # [n, 2] room to sort a section's floors and sizes
    trail: Any  # [t, 2] buffer and the floor that it had, or _PLACED
    registers: Any  # [4] int64: see TRAIL, ...; DEAD: a fixed buffer was pushed off its offset; [LEFT, RIGHT) sections where floors rose


def walk_of(net: SectionNet) -> FloorWalk:
    """All buffers at their lowest floors, none placed."""
    n, m = len(net.size), len(net.member_ptr) - 1
    member = np.repeat(np.arange(m), np.diff(net.member_ptr))
    total = np.zeros(m, np.int64)
    np.add.at(total, member, net.size[net.member_ids])
    lowest, top, topper, second = (np.zeros(m, np.int64) for _ in range(4))
    stands, may = (np.zeros(n, np.int8) for _ in range(2))
    walk = FloorWalk(
        np.where(net.fixed == FREE, 0, net.fixed), np.zeros(n, np.int8), np.diff(net.member_ptr), net.member_ids.copy(),
        np.argsort(net.member_ids, kind="stable"), total, lowest, top, topper, second, np.zeros(n, np.int64), stands, may,
        np.zeros(n, np.int64), np.ones(m), np.zeros((n, 2), np.int64), np.zeros((16 * n + 256, 2), np.int64), np.zeros(4, np.int64),
    )  # fmt: skip
    settle(net, walk)
    return walk


@kernel(borrows=True)
def settle(net: SectionNet, walk: FloorWalk) -> None:
    """Lifts free buffers out of fixed ones that they do not fit beneath, once and for all."""
    for buffer in range(len(net.size)):
        if net.fixed[buffer] == FREE:
            walk.floor[buffer] = _allowed(net, buffer, 0)


@kernel(inner=True, borrows=True)
def quiet(walk: FloorWalk) -> None:
    walk.registers[LEFT], walk.registers[RIGHT], walk.registers[DEAD] = NEVER, 0, 0


@kernel(inner=True, borrows=True)
def raise_floor(net: SectionNet, walk: FloorWalk, buffer: Any, offset: Any) -> None:
    registers = walk.registers
    if net.fixed[buffer] != FREE:
        registers[DEAD] = 1
        return
    place = registers[TRAIL]
    walk.trail[place, 0], walk.trail[place, 1] = buffer, walk.floor[buffer]
    registers[TRAIL] = place + 1
    walk.floor[buffer] = _allowed(net, buffer, offset)
    registers[LEFT] = min(registers[LEFT], net.low[buffer])
    registers[RIGHT] = max(registers[RIGHT], net.high[buffer])


@kernel(borrows=True)
def put(net: SectionNet, walk: FloorWalk, buffer: Any) -> None:
    """Places the buffer at its floor: all that meet it and are not placed lie above."""
    place = walk.registers[TRAIL]
    walk.trail[place, 0], walk.trail[place, 1] = buffer, _PLACED
    walk.registers[TRAIL] = place + 1
    walk.placed[buffer] = 1
    for section in range(net.low[buffer], net.high[buffer]):
        walk.count[section] -= 1
        walk.total[section] -= net.size[buffer]
        mine, last = net.seat_ptr[buffer] + section - net.low[buffer], net.member_ptr[section] + walk.count[section]
        seat, other = walk.seat[mine], walk.member[last]
        walk.member[seat], walk.member[last] = other, buffer
        walk.seat[mine], walk.seat[net.seat_ptr[other] + section - net.low[other]] = last, seat
    end, left, right = walk.floor[buffer] + net.size[buffer], net.low[buffer], net.high[buffer]
    for at in range(net.meet_ptr[buffer], net.meet_ptr[buffer + 1]):
        other = net.meet_ids[at]
        if walk.placed[other] or walk.floor[other] >= end:
            continue
        if not net.plain[other]:
            raise_floor(net, walk, other, end)
            continue
        place = walk.registers[TRAIL]  # what `raise_floor` does: a call would take longer
        walk.trail[place, 0], walk.trail[place, 1] = other, walk.floor[other]
        walk.registers[TRAIL] = place + 1
        walk.floor[other] = end
        left, right = min(left, net.low[other]), max(right, net.high[other])
    walk.registers[LEFT], walk.registers[RIGHT] = min(walk.registers[LEFT], left), max(walk.registers[RIGHT], right)


@kernel(borrows=True)
def take_back(net: SectionNet, walk: FloorWalk, mark: Any) -> None:
    """Undoes everything since the trail was `mark` long."""
    place = walk.registers[TRAIL]
    while place > mark:
        place -= 1
        buffer, floor = walk.trail[place, 0], walk.trail[place, 1]
        if floor != _PLACED:
            walk.floor[buffer] = floor
            continue
        walk.placed[buffer] = 0
        for section in range(net.low[buffer], net.high[buffer]):
            walk.count[section] += 1  # it is still in the seat behind those not placed
            walk.total[section] += net.size[buffer]
    walk.registers[TRAIL] = place


@kernel(inner=True, borrows=True)
def _allowed(net: SectionNet, buffer: Any, offset: Any) -> Any:
    """The lowest offset from this one on that is aligned and not in the way of a fixed buffer."""
    align, size = net.align[buffer], net.size[buffer]
    offset = -(-offset // align) * align
    for at in range(net.fixed_ptr[buffer], net.fixed_ptr[buffer + 1]):
        other = net.fixed_ids[at]
        if offset + size > net.fixed[other] and offset < net.fixed[other] + net.size[other]:
            offset = -(-(net.fixed[other] + net.size[other]) // align) * align
    return offset


class SeenStates(NamedTuple):
    """Open addressing over a power of two of slots; forgets everything when three quarters are taken."""

    words: Any  # [slots, 2] uint64; both 0 where a slot is free
    count: Any  # [1] slots taken


def new_seen(slots: int) -> SeenStates:
    """Nothing seen; `slots` is a power of two."""
    return SeenStates(np.zeros((slots, 2), np.uint64), np.zeros(1, np.int64))


@kernel(inner=True, borrows=True)
def state_of(net: SectionNet, walk: FloorWalk, left: Any, right: Any) -> Any:
    """Two words for the component of sections `[left, right)`."""
    one, two = np.uint64(left), np.uint64(right)
    for buffer in range(net.first[left], net.first[right]):
        if not walk.placed[buffer]:
            floor = np.uint64(walk.floor[buffer])
            one += _mixed(floor + net.key[buffer, 0])
            two += _mixed(floor ^ net.key[buffer, 1])
    return one, two


@kernel(borrows=True)
def is_seen(seen: SeenStates, one: Any, two: Any) -> Any:
    place = _slot(seen, one, two)
    return seen.words[place, 0] != 0 or seen.words[place, 1] != 0


@kernel(borrows=True)
def see(seen: SeenStates, one: Any, two: Any) -> None:
    if 4 * seen.count[0] > 3 * len(seen.words):
        seen.words[:] = 0
        seen.count[0] = 0
    place = _slot(seen, one, two)
    seen.count[0] += seen.words[place, 0] == 0 and seen.words[place, 1] == 0
    seen.words[place, 0], seen.words[place, 1] = one, two


@kernel(borrows=True)
def enlarge(seen: SeenStates, larger: SeenStates) -> None:
    for place in range(len(seen.words)):
        if seen.words[place, 0] != 0 or seen.words[place, 1] != 0:
            see(larger, seen.words[place, 0], seen.words[place, 1])


@kernel(inner=True, borrows=True)
def _slot(seen: SeenStates, one: Any, two: Any) -> Any:
    """Where these words are, or the free slot where they belong."""
    last = len(seen.words) - 1
    place = np.int64(one & np.uint64(last))
    while seen.words[place, 0] != 0 or seen.words[place, 1] != 0:
        if seen.words[place, 0] == one and seen.words[place, 1] == two:
            break
        place = (place + 1) & last
    return place


@kernel(inner=True, borrows=True)
def _mixed(word: Any) -> Any:
    """A bijection of 64 bits after which equal differences no longer show (splitmix64's)."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
