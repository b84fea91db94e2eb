"""The question behind the exact engine: is there an order within a bound?

Depth first over downsets. Safe commits run before each branching, and a table remembers for each downset where the search branched the
least bound that might still let it through: it failed under all lower ones, in this question and in every later one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from lowtide.schedule.commits import commit_all, take_back
from lowtide.schedule.downsets import DONE, HASH, LIVE, READY, SALT, Net, Walk, added_bytes, need_bytes, run, undo

YES, NO, PAUSED, FULL = range(4)  # what `search` came back with; FULL: the table or the stack wants more room
NEVER = 1 << 62  # a bound that no problem reaches
DEPTH, TOP, STATES, FOUND, ENTERED = range(5)  # registers of a search


class Table(NamedTuple):
    """What is known of downsets: open addressing, a power of two of slots."""

    words: Any  # [slots, 2] hash; both 0 where a slot is free
    least_bytes: Any  # [slots] no order goes on from that downset with a lower peak
    count: Any  # [1] slots taken


class Stack(NamedTuple):
    """Branchings from the empty downset to where a search stands."""

    entered: Any  # [depth] nodes that had run when it came to the branching, before commits
    first: Any  # [depth] where its candidates start in `nodes`
    next: Any  # [depth] the candidate that comes next
    least_bytes: Any  # [depth] the least bound that would have let it through so far
    swept: Any  # [depth] live bytes at which chains and valleys were last tried from all ready nodes, in vain
    nodes: Any  # [room] candidates, best first
    registers: Any  # [5] int64: see DEPTH, ...


def new_table(slots: int) -> Table:
    """An empty table; `slots` is a power of two."""
    return Table(np.zeros((slots, 2), np.int64), np.zeros(slots, np.int64), np.zeros(1, np.int64))


def new_stack(n: int, room: int) -> Stack:
    """An empty stack for problems of n nodes."""
    rows = [np.zeros(n + 2, np.int32) for _ in range(3)]
    return Stack(*rows, np.zeros(n + 2, np.int64), np.zeros(n + 2, np.int64), np.zeros(max(room, n + 1), np.int32), np.zeros(5, np.int64))


@njit(cache=True)
def reset(net: Net, walk: Walk, stack: Stack) -> None:
    """Back to the empty downset, ready for another bound."""
    take_back(net, walk, 0)
    stack.registers[DEPTH] = stack.registers[TOP] = stack.registers[ENTERED] = 0
    stack.registers[FOUND] = NEVER


@njit(cache=True)
def search(net: Net, walk: Walk, stack: Stack, table: Table, bound_bytes: Any, states: Any, grow: Any) -> Any:
    """Goes on until there is an answer, `states` branchings were made, or, if it may `grow`, table or stack are full.

    With YES, `walk.order` is within the bound. With NO, `stack.registers[FOUND]` is a bound that no order is below.
    """
    registers, limit = stack.registers, stack.registers[STATES] + states
    while True:
        if not registers[ENTERED]:
            if grow and (2 * table.count[0] > len(table.words) or registers[TOP] + net.target > len(stack.nodes)):
                return FULL
            if registers[STATES] >= limit:
                return PAUSED
            registers[STATES] += 1
            done = walk.registers[DONE]
            above = registers[DEPTH] - 1
            swept = commit_all(net, walk, bound_bytes, max(done - 1, 0), stack.swept[above] if above >= 0 else NEVER)
            if walk.registers[DONE] == net.target:
                return YES
            least = look_up(table, walk.registers[HASH], walk.registers[SALT])
            if least > bound_bytes:
                _fail(net, walk, stack, done, least)
                if registers[DEPTH] == 0:
                    return NO
                registers[ENTERED] = 1
                continue
            stack.swept[registers[DEPTH]] = swept
            _branch(net, walk, stack, bound_bytes, done)
        depth = registers[DEPTH] - 1
        if stack.next[depth] < registers[TOP]:
            node = stack.nodes[stack.next[depth]]
            stack.next[depth] += 1
            run(net, walk, node)
            registers[ENTERED] = 0
            continue
        remember(table, walk.registers[HASH], walk.registers[SALT], stack.least_bytes[depth])
        registers[TOP] = stack.first[depth]
        registers[DEPTH] = depth
        _fail(net, walk, stack, stack.entered[depth], stack.least_bytes[depth])
        if depth == 0:
            return NO
        registers[ENTERED] = 1


@njit(cache=True)
def _fail(net: Net, walk: Walk, stack: Stack, done: Any, least_bytes: Any) -> None:
    """Back before the node that led here; the branching above learns what would have let it through."""
    take_back(net, walk, done)
    depth = stack.registers[DEPTH]
    if depth == 0:
        stack.registers[FOUND] = least_bytes
        return
    undo(net, walk)
    stack.least_bytes[depth - 1] = min(stack.least_bytes[depth - 1], least_bytes)


@njit(cache=True)
def _branch(net: Net, walk: Walk, stack: Stack, bound_bytes: Any, done: Any) -> None:
    """A new branching over the ready nodes that fit: those that add least first, then those that need least."""
    registers, live = stack.registers, walk.registers[LIVE]
    depth, top = registers[DEPTH], registers[TOP]
    least = np.int64(NEVER)
    count = walk.registers[READY]
    added, need, nodes = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int32)
    fits = 0
    for place in range(count):
        node = walk.ready[place]
        bytes_needed = need_bytes(net, walk, node)
        if live + bytes_needed > bound_bytes:
            least = min(least, live + bytes_needed)
            continue
        added[fits], need[fits], nodes[fits] = added_bytes(walk, node), bytes_needed, node
        fits += 1
    for place in _ranked(added[:fits], need[:fits], nodes[:fits]):
        stack.nodes[top] = nodes[place]
        top += 1
    stack.entered[depth] = done
    stack.first[depth] = stack.next[depth] = registers[TOP]
    stack.least_bytes[depth] = least
    registers[TOP], registers[DEPTH] = top, depth + 1


@njit(cache=True)
def _ranked(added: Any, need: Any, nodes: Any) -> Any:
    """Places by (added, need, node): sorts that keep the order of equals, the least important first."""
    places = np.argsort(nodes, kind="mergesort")
    places = places[np.argsort(need[places], kind="mergesort")]
    return places[np.argsort(added[places], kind="mergesort")]


@njit(cache=True)
def look_up(table: Table, word: Any, salt: Any) -> Any:
    """The bound below which a downset is known to fail, 0 where nothing is known."""
    place = _slot(table, word, salt)
    return table.least_bytes[place]


@njit(cache=True)
def remember(table: Table, word: Any, salt: Any, least_bytes: Any) -> None:
    """Notes that a downset fails under all bounds below `least_bytes`; forgets it where the table is full."""
    if word == 0 and salt == 0:  # the empty downset, or as good as: its slot would look free
        return
    place = _slot(table, word, salt)
    if table.words[place, 0] == 0 and table.words[place, 1] == 0:
        if 10 * table.count[0] > 9 * len(table.words):
            return
        table.words[place, 0], table.words[place, 1] = word, salt
        table.count[0] += 1
    table.least_bytes[place] = max(table.least_bytes[place], least_bytes)


@njit(cache=True)
def _slot(table: Table, word: Any, salt: Any) -> Any:
    """The slot of a downset, or a free one."""
    mask = len(table.words) - 1
    place = word & mask
    while (table.words[place, 0] != word or table.words[place, 1] != salt) and (table.words[place, 0] != 0 or table.words[place, 1] != 0):
        place = (place + 1) & mask
    return place


@njit(cache=True)
def enlarge(table: Table, larger: Table) -> None:
    """Copies what is known."""
    for place in range(len(table.words)):
        if table.words[place, 0] != 0 or table.words[place, 1] != 0:
            remember(larger, table.words[place, 0], table.words[place, 1], table.least_bytes[place])
