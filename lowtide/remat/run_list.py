"""A sequence that runs are put into and taken out of, one at a time, with its footprint kept exact.

What one run changes is where copies of the few tensors end that it reads or makes. So neither the footprint nor the lists of who reads what
are made anew: a change takes about as long as the lives that it moves. Taking a run out and putting it back leaves all as it was.

Each run has a *slot* for as long as it is in the sequence. An *event* of a tensor is a slot that reads it, as twice its number, or one that
makes it, as that and one more; they are in the order of the sequence. What nobody has made yet counts from the start. Nothing is swapped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lowtide.base.kernels import kernel

_MORE = 8  # events for which each tensor has room beyond those that it has


class EventRows(NamedTuple):
    """By tensor its events, as rows with room behind them."""

    events: Any
    begin: Any  # [m] of a tensor's row
    length: Any  # [m]
    room: Any  # [m]


class RunList(NamedTuple):
    slots: Any  # by entry
    place: Any  # by slot, its entry
    node: Any  # by slot
    taken: Any  # by slot, the bytes that its first output finds in the memory of an input that dies there
    footprint: Any  # by entry, without what is resident
    free: Any  # slots that no run has, as a stack
    first: Any  # [n] the slot of a node's first run, -1 for none
    times: Any  # [n] how often it runs
    rows: Any
    sums: Any  # [5] entries; slots in the stack; bytes over the limit, over all entries; the limit; bytes that are kept at the end


@kernel(inner=True)
def run_list_of(sequence: Any, longest: Any, limit: Any, facts: Any) -> Any:
    """Of a sequence that may grow to so many entries: what putting in its runs one behind the other gives, in one pass."""
    nodes, length, sums = len(facts.cost_us), np.zeros(len(facts.kept), np.int64), np.zeros(5, np.int64)
    for node in sequence:
        for ptr, ids in ((facts.read_ptr, facts.read_ids), (facts.made_ptr, facts.made_ids)):
            for entry in range(ptr[node], ptr[node + 1]):
                length[ids[entry]] += 1
    room = length + length // 2 + _MORE
    time = RunList(
        np.empty(longest + 1, np.int32), np.empty(longest, np.int32), np.empty(longest, np.int32), np.zeros(longest, np.int64),
        np.empty(longest + 1, np.int64), np.arange(longest).astype(np.int32), np.full(nodes, -1, np.int32), np.zeros(nodes, np.int32),
        EventRows(np.empty(room.sum(), np.int32), np.cumsum(room) - room, np.zeros_like(length), room), sums,
    )  # fmt: skip
    count, rows = len(sequence), time.rows
    sums[0], sums[1], sums[3], sums[4] = count, longest - count, limit, (facts.kept * facts.tensor_bytes).sum()
    for at in range(count):
        slot, node = longest - 1 - at, sequence[at]
        time.slots[at], time.place[slot], time.node[slot] = slot, at, node
        time.times[node] += 1
        if time.first[node] < 0:
            time.first[node] = slot
        for tensor in facts.read_ids[facts.read_ptr[node] : facts.read_ptr[node + 1]]:
            _insert(tensor, rows.length[tensor], 2 * slot, rows)
        for tensor in facts.made_ids[facts.made_ptr[node] : facts.made_ptr[node + 1]]:
            _insert(tensor, rows.length[tensor], 2 * slot + 1, rows)
    _count_footprint(time, facts)
    return time


@kernel(inner=True)
def _count_footprint(time: Any, facts: Any) -> None:
    """Of all entries, from the events of all tensors."""
    count, place, rows = time.sums[0], time.place, time.rows
    change = np.zeros(count + 1, np.int64)
    for tensor in range(len(facts.kept)):
        start, end = 0, 0  # of a copy, which is there from the one entry until right before the other
        for row in range(rows.begin[tensor], rows.begin[tensor] + rows.length[tensor]):
            at = place[rows.events[row] >> 1]
            if rows.events[row] & 1:
                change[start] += facts.tensor_bytes[tensor] * (end > start)
                change[end] -= facts.tensor_bytes[tensor] * (end > start)
                start = at
            end = at + 1
        if facts.kept[tensor]:
            end = count
        change[start] += facts.tensor_bytes[tensor] * (end > start)
        change[end] -= facts.tensor_bytes[tensor] * (end > start)
    alive = np.int64(0)
    for at in range(count):
        slot = time.slots[at]
        alive += change[at]
        time.taken[slot] = _taken(slot, place, time.node, rows, facts)
        time.footprint[at] = alive + facts.workspace_bytes[time.node[slot]] - time.taken[slot]
        time.sums[2] += max(0, time.footprint[at] - time.sums[3])


@kernel(inner=True, borrows=True)
def wants_room(chain: Any, length: Any, time: Any, facts: Any) -> bool:
    """Whether rows of events may be too short for a chain of runs; if so, how much room they want is noted."""
    wants, rows = False, time.rows
    for each in range(length):
        for ptr, ids in ((facts.read_ptr, facts.read_ids), (facts.made_ptr, facts.made_ids)):
            for entry in range(ptr[chain[each]], ptr[chain[each] + 1]):
                tensor = ids[entry]
                if rows.room[tensor] - rows.length[tensor] <= length:
                    rows.room[tensor] = 2 * rows.length[tensor] + length + _MORE
                    wants = True
    return wants


@kernel(inner=True)
def with_room(time: Any) -> Any:
    """The same list, its rows of events as long as was noted."""
    rows = time.rows
    begin = np.cumsum(rows.room) - rows.room
    events = np.empty(rows.room.sum(), np.int32)
    for tensor in range(len(begin)):
        for at in range(rows.length[tensor]):
            events[begin[tensor] + at] = rows.events[rows.begin[tensor] + at]
    return RunList(
        time.slots, time.place, time.node, time.taken, time.footprint, time.free, time.first, time.times,
        EventRows(events, begin, rows.length, rows.room), time.sums,
    )  # fmt: skip


@kernel(inner=True, borrows=True)
def written(time: Any, sequence: Any) -> None:
    for at in range(len(sequence)):
        sequence[at] = time.node[time.slots[at]]


@kernel(inner=True, borrows=True)
def first_entry(node: Any, time: Any) -> int:
    return int(time.place[time.first[node]] if time.first[node] >= 0 else time.sums[0])


@kernel(inner=True, borrows=True)
def around(tensor: Any, at: Any, time: Any, facts: Any) -> tuple[int, int]:
    """The last entry before this one that makes or reads a tensor, and the first from there on that reads what is there; -1 for none."""
    place, rows = time.place, time.rows
    row, begin = _row_of(tensor, 2 * at, place, rows), rows.begin[tensor]
    before = place[rows.events[begin + row - 1] >> 1] if row > 0 else -1
    if row == rows.length[tensor]:
        return before, time.sums[0] if facts.kept[tensor] else -1
    return before, -1 if rows.events[begin + row] & 1 else place[rows.events[begin + row] >> 1]


@kernel(inner=True, borrows=True)
def put_in(node: Any, at: Any, time: Any, facts: Any) -> None:
    """Run a node once more, right before an entry."""
    count, limit, place, rows = time.sums[0], time.sums[3], time.place, time.rows
    level = np.int64(0)  # what is alive there
    if at < count:
        below = time.slots[at]
        node_below = time.node[below]
        level = time.footprint[at] + time.taken[below] - facts.workspace_bytes[node_below] - facts.made_bytes[node_below]
    else:
        level = time.sums[4]
    time.sums[1] -= 1
    slot = time.free[time.sums[1]]
    for entry in range(count, at, -1):
        moved = time.slots[entry - 1]
        time.slots[entry], time.footprint[entry] = moved, time.footprint[entry - 1]
        time.place[moved] = entry
    time.slots[at], time.place[slot], time.node[slot], time.taken[slot] = slot, at, node, 0
    time.footprint[at] = level + facts.workspace_bytes[node]
    time.sums[2] += max(0, time.footprint[at] - limit)
    time.sums[0] = count + 1
    time.times[node] += 1
    if time.first[node] < 0 or at < time.place[time.first[node]]:
        time.first[node] = slot
    for entry in range(facts.read_ptr[node], facts.read_ptr[node + 1]):
        tensor = facts.read_ids[entry]
        row = _row_of(tensor, 2 * at, place, rows)
        lives = _goes_on(tensor, row, rows, facts.kept)
        before = _before(tensor, row, rows)
        if not lives:
            _lift(_behind(before, place), at, facts.tensor_bytes[tensor], time.footprint, time.sums)
        _insert(tensor, row, 2 * slot, rows)
        if not lives and before >= 0 and _takes(before, time.node, facts.take_ptr):
            _take_anew(before, time, facts)
    for entry in range(facts.made_ptr[node], facts.made_ptr[node + 1]):
        tensor = facts.made_ids[entry]
        row = _row_of(tensor, 2 * at, place, rows)
        before = _before(tensor, row, rows)
        if _goes_on(tensor, row, rows, facts.kept):  # those behind read the new copy
            _lift(_behind(before, place), at - 1, -facts.tensor_bytes[tensor], time.footprint, time.sums)
        else:
            _lift(at, at, facts.tensor_bytes[tensor], time.footprint, time.sums)
        _insert(tensor, row, 2 * slot + 1, rows)
        if before >= 0 and _takes(before, time.node, facts.take_ptr):
            _take_anew(before, time, facts)
    if _takes(slot, time.node, facts.take_ptr):
        _take_anew(slot, time, facts)


@kernel(inner=True, borrows=True)
def take_out(at: Any, time: Any, facts: Any) -> None:
    """Leave out the run of an entry. What it made is as it was before where it is read."""
    slot, limit, place, rows = time.slots[at], time.sums[3], time.place, time.rows
    node = time.node[slot]
    for entry in range(facts.made_ptr[node], facts.made_ptr[node + 1]):
        tensor = facts.made_ids[entry]
        row = _row_of(tensor, 2 * at, place, rows)
        before = _before(tensor, row, rows)
        if _goes_on(tensor, row + 1, rows, facts.kept):
            _lift(_behind(before, place), at - 1, facts.tensor_bytes[tensor], time.footprint, time.sums)
        _delete(tensor, row, rows)
        if before >= 0 and _takes(before, time.node, facts.take_ptr):
            _take_anew(before, time, facts)
    for entry in range(facts.read_ptr[node], facts.read_ptr[node + 1]):
        tensor = facts.read_ids[entry]
        row = _row_of(tensor, 2 * at, place, rows)
        before, lives = _before(tensor, row, rows), _goes_on(tensor, row + 1, rows, facts.kept)
        if not lives:
            _lift(_behind(before, place), at - 1, -facts.tensor_bytes[tensor], time.footprint, time.sums)
        _delete(tensor, row, rows)
        if not lives and before >= 0 and _takes(before, time.node, facts.take_ptr):
            _take_anew(before, time, facts)
    time.sums[2] -= max(0, time.footprint[at] - limit)
    time.sums[0] -= 1
    for entry in range(at, time.sums[0]):
        moved = time.slots[entry + 1]
        time.slots[entry], time.footprint[entry] = moved, time.footprint[entry + 1]
        time.place[moved] = entry
    time.free[time.sums[1]] = slot
    time.sums[1] += 1
    time.times[node] -= 1
    if time.first[node] == slot:
        time.first[node] = -1
        if time.times[node] > 0:  # what runs again makes something
            tensor = facts.made_ids[facts.made_ptr[node]]
            for row in range(rows.begin[tensor], rows.begin[tensor] + rows.length[tensor]):
                if rows.events[row] & 1:
                    time.first[node] = rows.events[row] >> 1
                    break


@kernel(inner=True, borrows=True)
def _row_of(tensor: Any, wanted: Any, place: Any, rows: Any) -> int:
    """The number of the first event that is at twice an entry or behind."""
    begin, low, high = rows.begin[tensor], 0, rows.length[tensor]
    while low < high:
        middle = (low + high) >> 1
        if 2 * place[rows.events[begin + middle] >> 1] < wanted:
            low = middle + 1
        else:
            high = middle
    return int(low)


@kernel(inner=True, borrows=True)
def _goes_on(tensor: Any, row: Any, rows: Any, kept: Any) -> bool:
    """Whether what there is of a tensor before an event is read from there on."""
    if row == rows.length[tensor]:
        return bool(kept[tensor])
    return bool(rows.events[rows.begin[tensor] + row] & 1 == 0)


@kernel(inner=True, borrows=True)
def _before(tensor: Any, row: Any, rows: Any) -> int:
    """The slot of the event before, -1 for none."""
    return int(rows.events[rows.begin[tensor] + row - 1] >> 1 if row > 0 else -1)


@kernel(inner=True, borrows=True)
def _behind(slot: Any, place: Any) -> int:
    """The entry behind a slot; the first one behind none."""
    return int(place[slot] + 1 if slot >= 0 else 0)


@kernel(inner=True, borrows=True)
def _lift(low: Any, high: Any, more_bytes: Any, footprint: Any, sums: Any) -> None:
    """So many bytes more from one entry to another."""
    limit, over = sums[3], np.int64(0)
    for entry in range(low, high + 1):
        there = footprint[entry]
        over += max(0, there + more_bytes - limit) - max(0, there - limit)
        footprint[entry] = there + more_bytes
    sums[2] += over


@kernel(inner=True, borrows=True)
def _insert(tensor: Any, row: Any, event: Any, rows: Any) -> None:
    begin, end = rows.begin[tensor] + row, rows.begin[tensor] + rows.length[tensor]
    for entry in range(end, begin, -1):
        rows.events[entry] = rows.events[entry - 1]
    rows.events[begin] = event
    rows.length[tensor] += 1


@kernel(inner=True, borrows=True)
def _delete(tensor: Any, row: Any, rows: Any) -> None:
    rows.length[tensor] -= 1
    for entry in range(rows.begin[tensor] + row, rows.begin[tensor] + rows.length[tensor]):
        rows.events[entry] = rows.events[entry + 1]


@kernel(inner=True, borrows=True)
def _takes(slot: Any, node: Any, take_ptr: Any) -> bool:
    """Whether a slot's run can work in the memory of an input."""
    return bool(take_ptr[node[slot]] < take_ptr[node[slot] + 1])


@kernel(inner=True, borrows=True)
def _taken(slot: Any, place: Any, node: Any, rows: Any, facts: Any) -> int:
    """The bytes that the first output of a slot's run finds in the memory of an input that dies there."""
    each = node[slot]
    for entry in range(facts.take_ptr[each], facts.take_ptr[each + 1]):
        tensor = facts.take_ids[entry]
        if not _goes_on(tensor, _row_of(tensor, 2 * place[slot] + 1, place, rows), rows, facts.kept):
            return int(facts.tensor_bytes[facts.take_output[each]])
    return 0


@kernel(inner=True, borrows=True)
def _take_anew(slot: Any, time: Any, facts: Any) -> None:
    """What a slot's run takes, where that may have changed."""
    now = _taken(slot, time.place, time.node, time.rows, facts)
    if now != time.taken[slot]:
        _lift(time.place[slot], time.place[slot], time.taken[slot] - now, time.footprint, time.sums)
        time.taken[slot] = now
