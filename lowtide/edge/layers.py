"""The programme of `search`, compiled: beginnings of one layer, and all that follow from them by one more part.

A beginning is a row of bits (which tasks have run, which may run next) and of digits of four bits (where each live storage lies, from 1;
0 where it is not alive). Two are alike where their hashes of 128 bits are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel
from lowtide.edge.least_times import NEVER_PS, Ints, has_room

NARROW = 16  # beginnings a layer where the effort is spent


class Layer(NamedTuple):
    rows: NDArray[np.uint64]  # [beginnings, words]
    keys: NDArray[np.uint64]  # [beginnings, 2]
    time_ps: Ints
    left_ps: Ints
    extra_macs: Ints
    used: Ints  # [beginnings, spaces] bytes alive


class Reached(NamedTuple):
    """Beginnings that follow, each once, on their way into a layer."""

    keys: NDArray[np.uint64]
    time_ps: Ints  # NEVER_PS for one that another is better than
    left_ps: Ints
    extra_macs: Ints
    used: Ints
    steps: Ints  # [.., 8] length of the part, beginning, part, places as a number, space of its rings, taken, moved, to
    chain: Ints  # the next with the same key, or -1
    slots: Ints  # of the hash table: the first with a key, or -1


class Settings(NamedTuple):
    known_ps: int  # what takes as long or longer is left out
    most_extra_macs: int
    moves: bool
    dma: bool
    to_end: bool  # no move beneath the last step
    max_steps: int  # ways to try, but for the first few beginnings
    any_order: bool  # a view that is ready then comes first


def room_for(count: int, spaces: int) -> Reached:
    slots = 1 << (2 * count - 1).bit_length()
    return Reached(
        np.zeros((count, 2), np.uint64), np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64),
        np.zeros((count, spaces), np.int64), np.zeros((count, 8), np.int64), np.zeros(count, np.int64), np.full(slots, -1, np.int64),
    )  # fmt: skip


@kernel
def grown(reached: Any, larger: Any, count: Any) -> None:
    """Copies what was reached into one with more room."""
    for at in range(count):
        larger.keys[at] = reached.keys[at]
        larger.time_ps[at], larger.left_ps[at], larger.extra_macs[at] = reached.time_ps[at], reached.left_ps[at], reached.extra_macs[at]
        larger.used[at] = reached.used[at]
        larger.steps[at] = reached.steps[at]
        slot = _slot(larger, reached.keys[at, 0], reached.keys[at, 1])
        larger.chain[at] = larger.slots[slot]
        larger.slots[slot] = at


@kernel(inner=True, borrows=True)
def _slot(reached: Any, one: Any, two: Any) -> Any:
    mask = np.uint64(len(reached.slots) - 1)
    slot = one & mask
    while reached.slots[np.int64(slot)] >= 0:
        at = reached.slots[np.int64(slot)]
        if reached.keys[at, 0] == one and reached.keys[at, 1] == two:
            break
        slot = (slot + np.uint64(1)) & mask
    return np.int64(slot)


@kernel(inner=True, borrows=True)
def _has(row: Any, task: Any) -> Any:
    return (row[task >> 6] >> np.uint64(task & 63)) & np.uint64(1) == np.uint64(1)


@kernel(inner=True, borrows=True)
def _place(row: Any, begin: Any, storage: Any) -> Any:
    """Where a storage lies, from 1; 0 where it is not alive. Digits begin at a word of the row."""
    return np.int64((row[begin + (storage >> 4)] >> np.uint64(4 * (storage & 15))) & np.uint64(15))


@kernel(inner=True, borrows=True)
def _flip(row: Any, begin: Any, storage: Any, digit: Any) -> None:
    row[begin + (storage >> 4)] ^= np.uint64(digit) << np.uint64(4 * (storage & 15))


@kernel(inner=True, borrows=True)
def _is_over(parts: Any, row: Any, storage: Any, low: Any, high: Any) -> Any:
    """Whether nobody uses a storage any more once tasks from `low` to `high` have run."""
    if parts.kept[storage]:
        return False
    for at in range(parts.users_ptr[storage], parts.users_ptr[storage + 1]):
        user = parts.users[at]
        if not (low <= user < high or _has(row, user)):
            return False
    return True


@kernel(inner=True, borrows=True)
def _left(parts: Any, bounds: Any, row: Any, words: Any, low: Any, high: Any, part: Any, places: Any, results: Any, left: Any) -> Any:
    """What is left once it is known, too, where the storage lies that a part makes as number `results`."""
    storage, makes, base = parts.makes[parts.makes_ptr[part] + results], parts.makes_ptr[part], len(parts.room) + 1
    for at in range(parts.readers_ptr[storage], parts.readers_ptr[storage + 1]):
        reader = parts.readers[at]
        if low <= reader < high or _has(row, reader) or bounds.table_ptr[reader] < 0:
            continue
        before, after, weight = np.int64(0), np.int64(0), np.int64(1)
        for each in range(parts.reads_ptr[reader], parts.reads_ptr[reader + 1]):
            read = parts.reads[each]
            digit = _place(row, 2 * words, read)
            for one in range(results + 1):
                if parts.makes[makes + one] == read:
                    digit = places[one] + 1
            after += weight * digit
            before += 0 if read == storage else weight * digit
            weight *= base
        if bounds.table[bounds.table_ptr[reader] + after] == NEVER_PS:
            return np.int64(NEVER_PS)
        left += bounds.table[bounds.table_ptr[reader] + after] - bounds.table[bounds.table_ptr[reader] + before]
    return left


@kernel(inner=True, borrows=True)
def _add(reached: Any, count: Any, one: Any, two: Any, time: Any, left: Any, extra: Any) -> Any:
    """Where to write a beginning down: the next place, that of one that it is better than, or -1 where one is as good."""
    slot = _slot(reached, one, two)
    at, place = reached.slots[slot], np.int64(-1)
    while at >= 0:
        if reached.time_ps[at] <= time and reached.extra_macs[at] <= extra:
            return np.int64(-1)
        at = reached.chain[at]
    at = reached.slots[slot]
    while at >= 0:
        if time <= reached.time_ps[at] and extra <= reached.extra_macs[at]:
            if place < 0:
                place = at
            else:
                reached.time_ps[at] = NEVER_PS
        at = reached.chain[at]
    if place < 0:
        place = count
        reached.chain[place] = reached.slots[slot]
        reached.slots[slot] = place
        reached.keys[place, 0], reached.keys[place, 1] = one, two
    reached.time_ps[place], reached.left_ps[place], reached.extra_macs[place] = time, left, extra
    return place


@kernel
def expand(parts: Any, bounds: Any, layer: Any, words: Any, begin: Any, these: Any, reached: Any, count: Any, settings: Any) -> Any:
    """Everything that follows from beginnings by one of these parts (none: by any ready task), beside what was reached before.

    Gives the first beginning that is not done, as there was no more room or no more effort, how many were reached, and ways tried.
    """
    spaces, tried, capacity = len(parts.room), np.int64(0), len(reached.time_ps)
    tasks = len(parts.next_ptr) - 1
    ways = np.zeros(max(tasks, 1), np.int64)
    most = np.int64(1)
    for part in range(len(parts.low)):
        most = max(most, parts.makes_ptr[part + 1] - parts.makes_ptr[part], parts.reads_ptr[part + 1] - parts.reads_ptr[part])
    places, inputs, over = np.zeros(most, np.int64), np.zeros(most, np.int64), np.zeros(most, np.bool_)
    during, free = np.zeros(spaces, np.int64), np.zeros(spaces, np.int64)
    alive, there = np.zeros(spaces, np.int64), np.zeros(spaces, np.int64)
    taken_in = np.zeros(spaces, np.int64)
    for state in range(begin, len(layer.time_ps)):
        if state >= NARROW and tried >= settings.max_steps:
            return state, count, tried
        row = layer.rows[state]
        view: Any = np.int64(-1)
        amount = 0
        for word in range(words):
            bits = row[words + word]
            task = word * 64
            while bits:
                if bits & np.uint64(1):
                    ways[amount] = task
                    amount += 1
                    if view < 0 and parts.only_views[task] and parts.work_bytes[task, 0] == 0:
                        view = task
                bits >>= np.uint64(1)
                task += 1
        if len(these) == 0 and view >= 0:
            ways[0], amount = view, 1
        if len(these) > 0:
            amount = len(these) if view < 0 or not settings.any_order else 0
        for turn in range(amount):
            part = these[turn] if len(these) > 0 else ways[turn]
            low, high = parts.low[part], parts.high[part]
            if len(these) > 0:
                fits = True
                for task in range(low, high):
                    fits = fits and not _has(row, task)
                for at in range(parts.needs_ptr[part], parts.needs_ptr[part + 1]):
                    fits = fits and _has(row, parts.needs[at])
                if not fits:
                    continue
            extra = layer.extra_macs[state] + parts.extra_macs[part]
            if extra > settings.most_extra_macs:
                continue
            reads, count_reads = parts.reads_ptr[part], parts.reads_ptr[part + 1] - parts.reads_ptr[part]
            makes, results = parts.makes_ptr[part], parts.makes_ptr[part + 1] - parts.makes_ptr[part]
            one, two = layer.keys[state, 0], layer.keys[state, 1]
            for task in range(low, high):
                one ^= parts.task_keys[task, 0]
                two ^= parts.task_keys[task, 1]
            base_ps = parts.constants_ps[part]
            taken_in[:] = -1
            for at in range(count_reads):
                storage = parts.reads[reads + at]
                inputs[at] = _place(row, 2 * words, storage) - 1
                over[at] = _is_over(parts, row, storage, low, high)
                base_ps += parts.read_ps[reads + at, inputs[at]]
                if over[at]:
                    one ^= parts.place_keys[storage, inputs[at], 0]
                    two ^= parts.place_keys[storage, inputs[at], 1]
            for take in range(parts.takes_ptr[part + 1] - 1, parts.takes_ptr[part] - 1, -1):
                for at in range(count_reads):
                    if parts.reads[reads + at] == parts.takes[take] and over[at]:
                        taken_in[inputs[at]] = parts.takes[take]
            left = layer.left_ps[state]
            for task in range(low, high):
                if bounds.table_ptr[task] < 0 or settings.moves:
                    left -= bounds.share_ps[task]
                else:
                    digits, weight = np.int64(0), np.int64(1)
                    for at in range(count_reads):
                        digits += weight * (inputs[at] + 1)
                        weight *= spaces + 1
                    left -= bounds.table[bounds.table_ptr[task] + digits]
            has_work = False
            for space in range(spaces):
                has_work = has_work or parts.work_bytes[part, space] > 0
            for code in range(spaces**results):
                rest, time = code, base_ps
                during[:] = layer.used[state]
                for at in range(results - 1, -1, -1):
                    places[at], rest = rest % spaces, rest // spaces
                    time += parts.write_ps[makes + at, places[at]]
                taken = np.int64(-1) if results == 0 else taken_in[places[0]]
                fits = True
                for at in range(results):
                    if at > 0 or taken < 0:
                        during[places[at]] += parts.size[parts.makes[makes + at], places[at]]
                for space in range(spaces):
                    free[space] = parts.room[space] - during[space]
                    fits = fits and free[space] >= 0
                if not fits:
                    tried += 1
                    continue
                known, mine, yours = left, one, two
                alive[:] = during
                for at in range(results):
                    storage = parts.makes[makes + at]
                    if not settings.moves and known < NEVER_PS:
                        known = _left(parts, bounds, row, words, low, high, part, places, at, known)
                    if _is_over(parts, row, storage, low, high):
                        alive[places[at]] -= parts.size[storage, places[at]]
                    else:
                        mine ^= parts.place_keys[storage, places[at], 0]
                        yours ^= parts.place_keys[storage, places[at], 1]
                for at in range(count_reads):
                    if over[at] and parts.reads[reads + at] != taken:
                        alive[inputs[at]] -= parts.size[parts.reads[reads + at], inputs[at]]
                for rings in range(0 if parts.has_rings[part] else -1, spaces if parts.has_rings[part] else 0):
                    tried += 1
                    if has_work and not has_room(parts, part, free, rings):
                        continue
                    took = max(parts.macs_ps[part], time + (parts.work_ps[part, rings] if rings >= 0 else 0))
                    total = layer.time_ps[state] + took
                    if total + known >= settings.known_ps:
                        continue
                    if count == capacity:
                        return state, count, tried
                    place = _add(reached, count, mine, yours, total, known, extra)
                    if place >= 0:
                        count += place == count
                        reached.used[place] = alive
                        step = reached.steps[place]
                        step[0], step[1], step[2], step[3] = high - low, state, part, code
                        step[4], step[5], step[6], step[7] = rings, taken, -1, -1
                    if not settings.moves or settings.to_end or parts.is_no_step[part]:
                        continue
                    for storage in range(len(parts.kept)):
                        source = _place(row, 2 * words, storage) - 1
                        if source < 0:
                            continue
                        gone = False
                        for at in range(count_reads):
                            gone = gone or (parts.reads[reads + at] == storage and over[at])
                        if gone:
                            continue
                        for target in range(spaces):
                            nbytes = parts.size[storage, target]
                            if target == source:
                                continue
                            tried += 1
                            if nbytes > free[target]:
                                continue
                            there[:] = free
                            there[target] -= nbytes
                            if has_work and not has_room(parts, part, there, rings):
                                continue
                            move = parts.move_ps[storage, source, target]
                            moved = total + (max(0, move - took) if settings.dma else move)
                            if moved + known >= settings.known_ps:
                                continue
                            if count == capacity:
                                return state, count, tried
                            place = _add(
                                reached,
                                count,
                                mine ^ parts.place_keys[storage, source, 0] ^ parts.place_keys[storage, target, 0],
                                yours ^ parts.place_keys[storage, source, 1] ^ parts.place_keys[storage, target, 1],
                                moved,
                                known,
                                extra,
                            )
                            if place >= 0:
                                count += place == count
                                reached.used[place] = alive
                                reached.used[place, source] -= parts.size[storage, source]
                                reached.used[place, target] += nbytes
                                step = reached.steps[place]
                                step[0], step[1], step[2], step[3] = high - low, state, part, code
                                step[4], step[5], step[6], step[7] = rings, taken, storage, target
    return len(layer.time_ps), count, tried


@kernel
def write_rows(parts: Any, layer: Any, words: Any, chosen: Any, reached: Any, low_at: Any, rows: Any) -> None:
    """The rows of what was chosen, of those that follow from this layer: `low_at` tasks are what its parts have."""
    spaces = len(parts.room)
    for at in range(len(chosen)):
        step = reached.steps[chosen[at]]
        if step[0] != low_at:
            continue
        part, row = step[2], rows[at]
        row[:] = layer.rows[step[1]]
        low, high = parts.low[part], parts.high[part]
        for each in range(parts.reads_ptr[part], parts.reads_ptr[part + 1]):
            storage = parts.reads[each]
            if _is_over(parts, row, storage, low, high):
                _flip(row, 2 * words, storage, _place(row, 2 * words, storage))
        results, rest = parts.makes_ptr[part + 1] - parts.makes_ptr[part], step[3]
        for each in range(results - 1, -1, -1):
            storage = parts.makes[parts.makes_ptr[part] + each]
            if not _is_over(parts, row, storage, low, high):
                _flip(row, 2 * words, storage, rest % spaces + 1)
            rest //= spaces
        if step[6] >= 0:
            _flip(row, 2 * words, step[6], _place(row, 2 * words, step[6]) ^ (step[7] + 1))
        for task in range(low, high):
            row[task >> 6] |= np.uint64(1) << np.uint64(task & 63)
            row[words + (task >> 6)] &= ~(np.uint64(1) << np.uint64(task & 63))
        for task in range(low, high):
            for each in range(parts.next_ptr[task], parts.next_ptr[task + 1]):
                later = parts.next[each]
                ready = not _has(row, later)
                for need in range(parts.needs_ptr[later], parts.needs_ptr[later + 1]):
                    ready = ready and _has(row, parts.needs[need])
                if ready:
                    row[words + (later >> 6)] |= np.uint64(1) << np.uint64(later & 63)
