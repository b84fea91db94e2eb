"""The question behind the exact engine: is there an order within a bound?

Depth first over downsets. Safe commits run before each branching, and a table remembers for each downset where the search branched the
least bound that might still let it through: it failed under all lower ones, in this question and in every later one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lowtide.base.kernels import kernel
from lowtide.schedule.commits import commit_all, take_back
from lowtide.schedule.downsets import DONE, HASH, LIVE, MOVES, READY, SALT, DownsetNet, DownsetWalk, added_bytes, need_bytes, run, undo

YES, NO, PAUSED, FULL = range(4)  # what `search` came back with; FULL: the table wants more room
NEVER = 1 << 62  # a bound that no problem reaches
DEPTH, STATES, FOUND, ENTERED = range(4)  # registers of a search


class DownsetTable(NamedTuple):
    """What is known of downsets: open addressing, a power of two of slots."""

    words: Any  # [slots, 2] hash; both 0 where a slot is free
    least_bytes: Any  # [slots] no order goes on from that downset with a lower peak
    count: Any  # [1] slots taken


class OrderStack(NamedTuple):
    """Branchings from the empty downset to where a search stands."""

    entered: Any  # [depth] nodes that had run when it came to the branching, before commits
    tried: Any  # [depth, 3] the candidate that was tried last: bytes added, bytes needed, node; candidates are tried in that order
    least_bytes: Any  # [depth] the least bound that would have let it through so far
    swept: Any  # [depth] live bytes at which chains and valleys were last tried from all ready nodes, in vain
    registers: Any  # [4] int64: see DEPTH, ...


def new_table(slots: int) -> DownsetTable:
    """An empty table; `slots` is a power of two."""
    return DownsetTable(np.zeros((slots, 2), np.int64), np.zeros(slots, np.int64), np.zeros(1, np.int64))


def new_stack(n: int) -> OrderStack:
    least_bytes, swept = np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64)
    return OrderStack(np.zeros(n + 1, np.int32), np.zeros((n + 1, 3), np.int64), least_bytes, swept, np.zeros(4, np.int64))


@kernel(borrows=True)
def reset(net: DownsetNet, walk: DownsetWalk, stack: OrderStack) -> None:
    """Back to the empty downset, ready for another bound."""
    take_back(net, walk, np.int64(0))
    stack.registers[DEPTH] = stack.registers[ENTERED] = 0
    stack.registers[FOUND] = NEVER


@kernel(borrows=True)
def search(
    net: DownsetNet, walk: DownsetWalk, stack: OrderStack, table: DownsetTable, bound_bytes: Any, states: Any, moves: Any, may_grow: Any
) -> Any:
    """Goes on until there is an answer, `states` downsets were entered or `moves` made in all, or the table is half full and `may_grow`.

    With YES, `walk.order` is within the bound. With NO, `stack.registers[FOUND]` is a bound that no order is below.
    """
    registers = stack.registers
    while True:
        if not registers[ENTERED]:
            if may_grow and 2 * table.count[0] > len(table.words):
                return FULL
            if registers[STATES] >= states or walk.registers[MOVES] >= moves:
                return PAUSED
            registers[STATES] += 1
            done, depth = walk.registers[DONE], registers[DEPTH]
            swept = commit_all(net, walk, bound_bytes, max(done - 1, 0), stack.swept[depth - 1] if depth > 0 else NEVER)
            if walk.registers[DONE] == net.target:
                return YES
            least = look_up(table, walk.registers[HASH], walk.registers[SALT])
            if least <= bound_bytes:
                stack.entered[depth], stack.swept[depth], stack.least_bytes[depth] = done, swept, NEVER
                stack.tried[depth, 0], stack.tried[depth, 1], stack.tried[depth, 2] = -NEVER, 0, 0
                registers[DEPTH] += 1
            else:
                _fail(net, walk, stack, done, least)
            registers[ENTERED] = 1
        if registers[DEPTH] == 0:
            return NO
        node = _next_candidate(net, walk, stack, bound_bytes)
        if node >= 0:
            run(net, walk, node)
            registers[ENTERED] = 0
            continue
        registers[DEPTH] -= 1
        least = stack.least_bytes[registers[DEPTH]]
        remember(table, walk.registers[HASH], walk.registers[SALT], least)
        _fail(net, walk, stack, np.int64(stack.entered[registers[DEPTH]]), least)


@kernel(inner=True, borrows=True)
def _fail(net: DownsetNet, walk: DownsetWalk, stack: OrderStack, done: Any, least_bytes: Any) -> None:
    """Back before the node that led here; the branching above learns what would have let it through."""
    take_back(net, walk, done)
    depth = stack.registers[DEPTH]
    if depth == 0:
        stack.registers[FOUND] = least_bytes
        return
    undo(net, walk)
    stack.least_bytes[depth - 1] = min(stack.least_bytes[depth - 1], least_bytes)


@kernel(inner=True, borrows=True)
def _next_candidate(net: DownsetNet, walk: DownsetWalk, stack: OrderStack, bound_bytes: Any) -> Any:
    """Of the ready nodes that fit, the first after the one tried last: by what each adds, then needs, then its index; -1 after the last.

    Going through all of them each time is cheaper than sorting and keeping them, as few are ever tried.
    """
    depth, live = stack.registers[DEPTH] - 1, walk.registers[LIVE]
    added_before, need_before, node_before = stack.tried[depth, 0], stack.tried[depth, 1], stack.tried[depth, 2]
    best, best_added, best_need = np.int64(-1), np.int64(0), np.int64(0)
    for position in range(walk.registers[READY]):
        node = np.int64(walk.ready[position])
        added = added_bytes(walk, node)
        if added < added_before or (best >= 0 and added > best_added):
            continue
        need = need_bytes(net, walk, node)
        if live + need > bound_bytes:
            stack.least_bytes[depth] = min(stack.least_bytes[depth], live + need)
        elif not _before((added_before, need_before, node_before), (added, need, node)):
            continue
        elif best < 0 or _before((added, need, node), (best_added, best_need, best)):
            best, best_added, best_need = node, added, need
    stack.tried[depth, 0], stack.tried[depth, 1], stack.tried[depth, 2] = best_added, best_need, best
    return best


@kernel(inner=True, borrows=True)
def _before(one: Any, two: Any) -> Any:
    if one[0] != two[0]:
        return one[0] < two[0]
    if one[1] != two[1]:
        return one[1] < two[1]
    return one[2] < two[2]


@kernel(inner=True, borrows=True)
def look_up(table: DownsetTable, word: Any, salt: Any) -> Any:
    """The bound below which a downset is known to fail, 0 where nothing is known."""
    position = _slot(table, word, salt)
    return table.least_bytes[position]


@kernel(inner=True, borrows=True)
def remember(table: DownsetTable, word: Any, salt: Any, least_bytes: Any) -> None:
    """Notes that a downset fails under all bounds below `least_bytes`; forgets it where the table is full."""
    if word == 0 and salt == 0:  # the empty downset, or as good as: its slot would look free
        return
    position = _slot(table, word, salt)
    if table.words[position, 0] == 0 and table.words[position, 1] == 0:
        if 10 * table.count[0] > 9 * len(table.words):
            return
        table.words[position, 0], table.words[position, 1] = word, salt
        table.count[0] += 1
    table.least_bytes[position] = max(table.least_bytes[position], least_bytes)


@kernel(inner=True, borrows=True)
def _slot(table: DownsetTable, word: Any, salt: Any) -> Any:
    mask = len(table.words) - 1
    position = word & mask
    while (table.words[position, 0] != word or table.words[position, 1] != salt) and (
        table.words[position, 0] != 0 or table.words[position, 1] != 0
    ):
        position = (position + 1) & mask
    return position


@kernel(borrows=True)
def enlarge(table: DownsetTable, larger: DownsetTable) -> None:
    for position in range(len(table.words)):
        if table.words[position, 0] != 0 or table.words[position, 1] != 0:
            remember(larger, table.words[position, 0], table.words[position, 1], table.least_bytes[position])
