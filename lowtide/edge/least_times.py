"""A problem's parts (a task, or several that a cut makes one) as arrays, and the least time of each by where its inputs lie, compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel

Ints = NDArray[np.int64]
NEVER_PS = 2**62
_MOST_COMBINATIONS = 5_000  # of places of one part's storages; above that each is bounded alone


class EdgeParts(NamedTuple):
    """A problem's parts, tasks and storages. The first parts are the tasks. Lists are cut out of one array by `ptr`s."""

    low: Ints  # [parts] its tasks are from `low` to `high`
    high: Ints
    needs_ptr: Ints  # tasks that run before it
    needs: Ints
    reads_ptr: Ints
    reads: Ints  # storages
    read_ps: Ints  # [reads, spaces]
    makes_ptr: Ints
    makes: Ints
    write_ps: Ints  # [makes, spaces]
    takes_ptr: Ints
    takes: Ints  # storages that the first that it makes may be written over
    work_bytes: Ints  # [parts, spaces]
    work_ps: Ints  # [parts, spaces] of its rings
    has_rings: NDArray[np.bool_]
    macs_ps: Ints
    constants_ps: Ints
    extra_macs: Ints
    other_bytes: Ints  # alive beside it in every order
    only_views: NDArray[np.bool_]
    is_no_step: NDArray[np.bool_]  # nothing moves beneath it
    next_ptr: Ints  # [tasks] tasks that need it
    next: Ints
    users_ptr: Ints  # [storages] tasks that make or read it
    users: Ints
    readers_ptr: Ints
    readers: Ints
    kept: NDArray[np.bool_]
    size: Ints  # [storages, spaces]
    room: Ints  # [spaces]
    is_for_all: NDArray[np.bool_]  # [spaces] whether what is made may lie there
    move_ps: Ints  # [storages, spaces, spaces]
    task_keys: NDArray[np.uint64]  # [tasks, 2]
    place_keys: NDArray[np.uint64]  # [storages, spaces, 2]


class LeastTimes(NamedTuple):
    """The least time of what is left: a share of each task, and where that is known, the least time by where its inputs lie."""

    share_ps: Ints  # [tasks]
    table_ptr: Ints  # [tasks] -1: only its share is known
    table: Ints  # by the digits of its inputs' spaces, 0 where one is not known, the first input's lowest


@kernel(inner=True, borrows=True)
def has_room(parts: Any, part: Any, free: Any, rings: Any) -> Any:
    """Whether the workspace has room, in the space of its rings where it has some."""
    if rings >= 0:
        return free[rings] >= parts.work_bytes[part, rings]
    has = False
    for space in range(len(free)):
        has = has or free[space] >= parts.work_bytes[part, space]
    return has


@kernel
def least_of(parts: Any, part: Any, known: Any) -> Any:
    """The least time of a part where its inputs lie in known spaces, from 1, 0 where that is not known; NEVER_PS where it cannot run."""
    spaces, first, count = len(parts.room), parts.reads_ptr[part], parts.reads_ptr[part + 1] - parts.reads_ptr[part]
    makes, results = parts.makes_ptr[part], parts.makes_ptr[part + 1] - parts.makes_ptr[part]
    unknown = results
    for at in range(count):
        unknown += known[at] == 0
    if spaces**unknown > _MOST_COMBINATIONS:
        return _least_apart(parts, part, known)
    places, digits = np.zeros(count, np.int64), np.zeros(results, np.int64)
    taken = np.zeros(spaces, np.bool_)
    used, free = np.zeros(spaces, np.int64), np.zeros(spaces, np.int64)
    least: Any = np.int64(NEVER_PS)
    for code in range(spaces**unknown):
        rest = code
        for at in range(count):
            if known[at]:
                places[at] = known[at] - 1
            else:
                places[at], rest = rest % spaces, rest // spaces
        for at in range(results):
            digits[at], rest = rest % spaces, rest // spaces
        time = parts.constants_ps[part]
        used[:] = 0
        taken[:] = False
        for at in range(count):
            space = places[at]
            used[space] += parts.size[parts.reads[first + at], space]
            time += parts.read_ps[first + at, space]
            for take in range(parts.takes_ptr[part], parts.takes_ptr[part + 1]):
                taken[space] = taken[space] or parts.takes[take] == parts.reads[first + at]
        for at in range(results):
            time += parts.write_ps[makes + at, digits[at]]
            if at > 0 or not taken[digits[0]]:
                used[digits[at]] += parts.size[parts.makes[makes + at], digits[at]]
        total, fits = np.int64(0), True
        for space in range(spaces):
            free[space] = parts.room[space] - used[space]
            fits = fits and free[space] >= 0
            total += min(free[space], np.int64(NEVER_PS) // 16) if parts.is_for_all[space] else 0
        if not fits or total < parts.other_bytes[part]:
            continue
        if not parts.has_rings[part]:
            if has_room(parts, part, free, -1):
                least = min(least, max(parts.macs_ps[part], time))
            continue
        for space in range(spaces):
            if has_room(parts, part, free, space):
                least = min(least, max(parts.macs_ps[part], time + parts.work_ps[part, space]))
    return least


@kernel(inner=True, borrows=True)
def _least_in(nbytes: Any, which: Any, times_ps: Any, at: Any, room: Any) -> Any:
    """The least of a row of times over the spaces that have room for so many bytes; NEVER_PS where none has."""
    least = np.int64(NEVER_PS)
    for space in range(len(room)):
        if nbytes[which, space] <= room[space]:
            least = min(least, times_ps[at, space])
    return least


@kernel(inner=True, borrows=True)
def _least_apart(parts: Any, part: Any, known: Any) -> Any:
    """The same where each storage has all the room to itself."""
    first, makes, time = parts.reads_ptr[part], parts.makes_ptr[part], parts.constants_ps[part]
    for at in range(first, parts.reads_ptr[part + 1]):
        if known[at - first]:
            time += parts.read_ps[at, known[at - first] - 1]
            continue
        least = _least_in(parts.size, parts.reads[at], parts.read_ps, at, parts.room)
        if least == NEVER_PS:
            return least
        time += least
    for at in range(makes, parts.makes_ptr[part + 1]):
        least = _least_in(parts.size, parts.makes[at], parts.write_ps, at, parts.room)
        if least == NEVER_PS:
            return least
        time += least
    least = _least_in(parts.work_bytes, part, parts.work_ps, part, parts.room)
    return least if least == NEVER_PS else max(parts.macs_ps[part], time + least)


@kernel
def fill_tables(parts: Any, bounds: Any) -> None:
    """The least time of each task that has a table, for all that may be known of its inputs."""
    spaces = len(parts.room)
    for task in range(len(bounds.table_ptr)):
        begin = bounds.table_ptr[task]
        if begin < 0:
            continue
        count = parts.reads_ptr[task + 1] - parts.reads_ptr[task]
        known = np.zeros(count, np.int64)
        for code in range((spaces + 1) ** count):
            rest = code
            for at in range(count):
                known[at], rest = rest % (spaces + 1), rest // (spaces + 1)
            bounds.table[begin + code] = least_of(parts, task, known)
