"""One question to the exact placer, "does it fit within this capacity", asked in many ways until one of them answers.

How long a search takes has a heavy tail: an order of trying that is lucky needs as many nodes as there are buffers, another one
millions. So it starts anew again and again, in several ways, mostly for short runs and sometimes for long ones. What failed is
remembered all along; and each way remembers how often each section failed, and branches there the earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.placement.exact.bounds import Rules
from lowtide.placement.exact.floors import FloorWalk, SeenStates, enlarge, new_seen, walk_of
from lowtide.placement.exact.search import FULL, NODES, PlaceStack, grown, new_stack, search
from lowtide.placement.exact.sections import SectionNet, Sections
from lowtide.problems.placement import Ints

_FIRST_NODES = 500  # of the shortest runs
_FORGET = 0.9  # of a section's weight, kept from one run to the next
_SLOTS, _MOST_SLOTS = 1 << 12, 1 << 20  # of the table of what failed


class TryOrder(NamedTuple):
    """An order of trying."""

    rank: str  # what comes first: the buffer's most Total bytes of a section, its Width in sections, its Area
    filling: int  # as in Rules
    weighted: int


WAYS = (TryOrder("TAW", 2, 1), TryOrder("TWA", 1, 1), TryOrder("TAW", 0, 0))


@dataclass(frozen=True)
class Switches:
    """Which techniques are on."""

    canonical: bool
    inference: bool
    lifting: bool
    decomposition: bool
    dynamic: bool
    symmetry: bool
    memory: bool
    restarts: bool


class CapacityQuestion:
    """Whether a problem fits within `capacity` units."""

    def __init__(self, cut: Sections, switches: Switches, capacity: int) -> None:
        self.net, self.switches, self.capacity = cut.net, switches, capacity
        self.seen: SeenStates = new_seen(_SLOTS)
        self.ranks = {strategy: _rank(cut.net, strategy.rank) for strategy in WAYS}
        self.fresh = walk_of(cut.net)
        self.weight: dict[TryOrder, NDArray[np.float64]] = {}  # of sections, as each way has learned it
        self.way = WAYS[0]
        self.runs = self.done_nodes = 0
        self._start_anew()

    @property
    def nodes(self) -> int:
        return self.done_nodes + int(self.stack.registers[NODES])

    @property
    def floor(self) -> Ints:
        """After YES: offsets in units."""
        floor: Ints = self.walk.floor
        return floor

    def go_on(self, nodes: int) -> int:
        """YES, NO, or PAUSED after at most this many nodes more."""
        spent = int(self.stack.registers[NODES])
        if spent >= self.quota and self.switches.restarts:
            self._start_anew()
            spent = 0
        until = spent + nodes
        if self.switches.restarts:
            until = min(until, self.quota)
        while True:
            may_grow = len(self.seen.words) < _MOST_SLOTS
            answer = int(search(self.net, self.walk, self.stack, self.seen, self.rules, self.capacity, until, may_grow))
            if answer != FULL:
                return answer
            self._grow()

    def _start_anew(self) -> None:
        if self.runs:
            self.done_nodes += int(self.stack.registers[NODES])
            self.weight[self.way] = _FORGET * self.walk.weight + (1 - _FORGET)
        strategy = self.way = WAYS[self.runs % len(WAYS)]
        self.runs += 1
        self.quota = _FIRST_NODES * luby(self.runs)
        self.walk: FloorWalk = FloorWalk(
            *(each.copy() for each in self.fresh._replace(weight=self.weight.get(strategy, self.fresh.weight)))
        )
        self.stack: PlaceStack = new_stack(self.net)
        on = self.switches
        self.rules = Rules(
            int(on.canonical), int(on.inference), int(on.lifting), int(on.decomposition), int(on.dynamic), int(on.symmetry),
            int(on.memory), strategy.weighted, strategy.filling, self.ranks[strategy],
        )  # fmt: skip

    def _grow(self) -> None:
        if 2 * int(self.seen.count[0]) > len(self.seen.words) and len(self.seen.words) < _MOST_SLOTS:
            larger = new_seen(2 * len(self.seen.words))
            enlarge(self.seen, larger)
            self.seen = larger
        else:
            self.walk, self.stack = grown(self.walk, self.stack)


def luby(run: int) -> int:
    """How long the run with this number, from 1 on, is: 1, 1, 2, 1, 1, 2, 4, 1, ...: of each length as many times in all as of any other.

    No fixed sequence of restarts is better by more than a logarithm, whatever the distribution (Luby, Sinclair and Zuckerman, 1993).
    """
    while run & (run + 1):
        run -= (1 << (run.bit_length() - 1)) - 1
    return (run + 1) // 2


def _rank(net: SectionNet, letters: str) -> NDArray[np.int64]:
    """Each buffer's place in the order that `letters` describe, the largest first."""
    width = net.high - net.low
    member = np.repeat(np.arange(len(net.member_ptr) - 1), np.diff(net.member_ptr))
    total = np.bincount(member, net.size[net.member_ids], len(net.member_ptr) - 1)
    most = np.zeros(len(net.size))
    np.maximum.at(most, net.member_ids, total[member])
    features = {"T": most, "W": width, "A": net.size * width}
    order = np.lexsort([features[letter] for letter in reversed(letters)])[::-1]
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank
