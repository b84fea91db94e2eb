"""One question to the exact placer, "does it fit within this capacity", asked in many ways until one of them answers.

How long a search takes has a heavy tail: an order of trying that is lucky needs as many nodes as there are buffers, another one millions. So
it starts anew again and again, each time with another order, and goes on for longer after every round of orders. What failed is remembered
all along, and so is how often each section failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.ir.placement import Ints
from lowtide.place.exact_bounds import Rules
from lowtide.place.exact_floors import Walk, walk_of
from lowtide.place.exact_search import FULL, NODES, PAUSED, Stack, grown, new_stack, search
from lowtide.place.exact_seen import Seen, enlarge, new_seen
from lowtide.place.sections import Cut, Net

_FIRST_NODES = 500  # of a run in the first round; doubled after each round
_FORGET = 0.9  # of a section's weight, kept from one run to the next
_SLOTS, _MOST_SLOTS = 1 << 12, 1 << 20  # of the table of what failed
_SEED = 7


class Way(NamedTuple):
    """An order of trying."""

    rank: str  # what comes first: the buffer's most Total bytes of a section, its Width in steps, Area, siZe; R is at random
    filling: int  # as in Rules
    weighted: int


WAYS = (
    Way("TAW", 2, 1), Way("TWA", 1, 1), Way("TAW", 0, 0), Way("TWA", 2, 1), Way("TWA", 0, 0), Way("R", 2, 1), Way("AWT", 0, 1), Way("R", 1, 1),
    Way("WTA", 1, 1), Way("AWT", 2, 1), Way("R", 0, 0), Way("ZTW", 1, 1),
)  # fmt: skip


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


class Question:
    """Whether a problem fits within `capacity` units."""

    def __init__(self, parts: Cut, switches: Switches, capacity: int) -> None:
        self.net, self.switches, self.capacity = parts.net, switches, capacity
        self.seen: Seen = new_seen(_SLOTS)
        self.random = np.random.default_rng(_SEED)
        self.orders = {way.rank: _rank(parts.net, way.rank) for way in WAYS if way.rank != "R"}
        self.fresh = walk_of(parts.net)
        self.runs = self.done_nodes = 0
        self._start_anew()

    @property
    def nodes(self) -> int:
        """Effort so far."""
        return self.done_nodes + int(self.stack.registers[NODES])

    @property
    def floor(self) -> Ints:
        """After YES: offsets in units."""
        return self.walk.floor

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
            said = int(search(self.net, self.walk, self.stack, self.seen, self.rules, self.capacity, until, may_grow))
            if said != FULL:
                return said
            self._grow()

    def _start_anew(self) -> None:
        if self.runs:
            self.done_nodes += int(self.stack.registers[NODES])
            self.fresh.weight[:] = _FORGET * self.walk.weight + (1 - _FORGET)
        way = WAYS[self.runs % len(WAYS)]
        self.quota = _FIRST_NODES << (self.runs // len(WAYS))
        self.runs += 1
        self.walk: Walk = Walk(*(each.copy() for each in self.fresh))
        self.stack: Stack = new_stack(self.net)
        rank = self.random.permutation(len(self.net.size)) if way.rank == "R" else self.orders[way.rank]
        on = self.switches
        self.rules = Rules(
            int(on.canonical), int(on.inference), int(on.lifting), int(on.decomposition), int(on.dynamic), int(on.symmetry),
            int(on.memory), way.weighted, way.filling, rank,
        )  # fmt: skip

    def _grow(self) -> None:
        if 2 * int(self.seen.count[0]) > len(self.seen.words) and len(self.seen.words) < _MOST_SLOTS:
            larger = new_seen(2 * len(self.seen.words))
            enlarge(self.seen, larger)
            self.seen = larger
        else:
            self.walk, self.stack = grown(self.walk, self.stack)


def _rank(net: Net, letters: str) -> NDArray[np.int64]:
    """Each buffer's place in the order that `letters` describe, the largest first."""
    width = net.high - net.low
    member = np.repeat(np.arange(len(net.member_ptr) - 1), np.diff(net.member_ptr))
    total = np.bincount(member, net.size[net.member_ids], len(net.member_ptr) - 1)
    most = np.zeros(len(net.size))
    np.maximum.at(most, net.member_ids, total[member])
    features = {"T": most, "W": width, "A": net.size * width, "Z": net.size}
    order = np.lexsort([features[letter] for letter in reversed(letters)])[::-1]
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank
