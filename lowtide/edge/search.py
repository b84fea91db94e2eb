"""The order, spaces, moves and cuts of least time, by bytes alive: a dynamic programme over what has run and where each live storage lies.

After k tasks two beginnings that ran the same tasks, and left the same storages in the same spaces, go on alike: only the faster one is
kept. A beginning is dropped where its time and the least time of what is left reach the best time known. Where more beginnings are
left than the width, the least hopeful are set aside: the least that one of them could reach is then a lower bound of the whole.
A cut runs several tasks as one part, so that it leads from one layer to one further on.

The least time of what is left is a sum over tasks. Each has the least time of its own, over the places of its own storages which fit beside
one another, and leave room for what is alive at that task in every order. Where cuts may run it, its share is the difference of two
shortest ways to the end, by parts in the network's order: no part takes less than the shares of its tasks. Where nothing may move,
storages stay where they are, and what a task takes is known better with each of its inputs that has a place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.edge.cut_search import CutPart
from lowtide.edge.layers import NARROW, Layer, Reached, Settings, expand, grown, room_for, write_rows
from lowtide.edge.least_times import NEVER_PS, EdgeParts, Ints, LeastTimes, fill_tables, least_of
from lowtide.edge.plan import rounded_up
from lowtide.edge.problem import EdgeProblem, ring_ps, traffic_ps
from lowtide.edge.residences import Choice
from lowtide.errors import FormatError

NEVER = NEVER_PS  # picoseconds: it cannot be
_MOST_PS = 2**60  # of all that a network could take: sums then never overflow
_MOST_SPACES = 14
_MOST_BEGINNINGS = 5_000  # ways to place what the caller gives
_NO_ROOM = 2**52  # bytes of what may not lie in a space
_MOST_KNOWN = 2**16  # of what may be known of one task's inputs: its share is a single number above that
_WEIGHT_STEPS = 60  # ways to share many weights out between one memory and flash
_MOST_REACHED = 2**20  # beginnings of one layer that are looked at, of which the most hopeful are kept
_SEED = 20_261_128  # of the hash words


Beginning = tuple[int, tuple[int, ...], dict[int, int]]  # time of what is left, bytes by space, where what the caller gives lies


@dataclass(frozen=True)
class Found:
    """The best choice that one pass found, and what it proved."""

    choice: Choice | None  # None where none is better than what was known
    cuts: tuple[CutPart, ...]
    order: tuple[int, ...]  # all tasks as they run, those of a cut one behind the other
    time_ps: int  # of it, or of what was known
    bound_ps: int  # no choice takes less


class Programme:
    """The dynamic programme of one problem for one room in each space. Cuts that lead to nothing below `known_ps` are left out."""

    def __init__(
        self, problem: EdgeProblem, room_bytes: Sequence[int], *, moves: bool, cuts: Sequence[CutPart] = (), known_ps: int = NEVER
    ) -> None:
        self.problem, self.moves = problem, moves
        self.count, self.n = len(problem.spaces), len(problem.tasks)
        if self.count > _MOST_SPACES:
            raise FormatError(f"memories: expected at most {_MOST_SPACES}, got {self.count}")
        self.words, self.digits = -(-self.n // 64), len(problem.size_bytes) // 16 + 1
        self.steps = 0  # ways that were tried to run a part after a beginning, or to move beneath it
        self.parts, self.cuts = parts_of(problem, room_bytes, cuts), list(cuts)
        least = [int(least_of(self.parts, part, np.zeros(self._inputs(part), np.int64))) for part in range(self.n + len(cuts))]
        self.free_ps = least[: self.n]
        kept, ways = list(range(len(cuts))), self._ways(cuts, least[self.n :])
        while True:
            gains = {at: least[self.n + at] - ways[cuts[at].first] + ways[cuts[at].end] for at in kept if least[self.n + at] < NEVER}
            better = [at for at, gain in gains.items() if ways[0] + gain < known_ps]
            if len(better) == len(kept):
                break
            kept, ways = better, self._ways([cuts[at] for at in better], [least[self.n + at] for at in better])
        self.root_bound_ps = min(ways[0], known_ps)
        if len(kept) < len(cuts):
            self.cuts = [cuts[at] for at in kept]
            self.parts = parts_of(problem, room_bytes, self.cuts)
        self.lengths: dict[int, list[int]] = {}
        for at, cut in enumerate(self.cuts):
            self.lengths.setdefault(cut.end - cut.first, []).append(self.n + at)
        self.bounds = self._bounds(ways)

    def _inputs(self, part: int) -> int:
        return int(self.parts.reads_ptr[part + 1] - self.parts.reads_ptr[part])

    def _ways(self, cuts: Sequence[CutPart], least: Sequence[int]) -> list[int]:
        """[n + 1] the least time from each task to the end, by parts in the network's order; NEVER where there is none."""
        starting: list[list[tuple[int, int]]] = [[(each, at + 1)] for at, each in enumerate(self.free_ps)]
        for cut, each in zip(cuts, least, strict=True):
            starting[cut.first].append((each, cut.end))
        ways = [0] * (self.n + 1)
        for at in reversed(range(self.n)):
            ways[at] = min(NEVER, *(each + ways[end] for each, end in starting[at]), NEVER)
        return ways

    def _bounds(self, ways: Sequence[int]) -> LeastTimes:
        most = max(each for each in ways if each < NEVER)
        known = [min(each, most) for each in ways]
        share = np.array([known[at] - known[at + 1] for at in range(self.n)], np.int64)
        covered = {at for cut in self.cuts for at in range(cut.first, cut.end)}
        begin, table_ptr = 0, np.full(self.n, -1, np.int64)
        for at in range(self.n):
            size = (self.count + 1) ** self._inputs(at)
            if not self.moves and at not in covered and size <= _MOST_KNOWN:
                table_ptr[at], begin = begin, begin + size
        bounds = LeastTimes(share, table_ptr, np.zeros(begin, np.int64))
        if self.root_bound_ps < NEVER:
            fill_tables(self.parts, bounds)
        return bounds

    def find(self, known_ps: int, *, width: int, max_steps: int, most_extra_macs: int = 0, order: Sequence[int] | None = None) -> Found:
        """The best choice that takes less than `known_ps`, over all orders or in one; no more than `width` beginnings a layer.

        With an order the bound is of that order only.
        """
        if self.root_bound_ps >= known_ps:
            return Found(None, (), (), known_ps, known_ps)
        first = self._first(known_ps)
        layers: list[Layer | None] = [first]
        steps: list[Ints] = []
        dropped, until = self.dropped_ps, self.steps + max_steps
        most_extra_macs = most_extra_macs if self.cuts else 0
        for at in range(1, self.n + 1):
            reached, count = room_for(1024, self.count), 0
            tries = [(length, these) for length in sorted({1, *self.lengths}) for these in self._these(at - length, length, order)]
            for length, these in tries:
                layer = layers[at - length]
                begin, total = 0, 0 if layer is None else len(layer.time_ps)
                while begin < total:
                    budget = max(0, until - self.steps)
                    settings = Settings(known_ps, most_extra_macs, self.moves, self.problem.dma, at == self.n, budget, order is None)
                    begin, count, tried = expand(self.parts, self.bounds, layer, self.words, begin, these, reached, count, settings)
                    self.steps += int(tried)
                    is_full = count == len(reached.time_ps)
                    if begin < total and layer is not None and (not is_full or count >= _MOST_REACHED):  # the effort is spent
                        dropped = min(dropped, int((layer.time_ps[begin:] + layer.left_ps[begin:]).min()))
                        break
                    if begin < total:
                        larger = room_for(4 * len(reached.time_ps), self.count)
                        grown(reached, larger, count)
                        reached = larger
            chosen, most = _ranked(reached, count), width if self.steps < until else min(width, NARROW)
            if len(chosen) > most:
                dropped = min(dropped, int(reached.time_ps[chosen[most]] + reached.left_ps[chosen[most]]))
                chosen = chosen[:most]
            layers.append(self._layer(layers, at, reached, chosen))
            steps.append(reached.steps[chosen])
            if at >= max([1, *self.lengths]):
                layers[at - max([1, *self.lengths])] = None
        last = layers[-1]
        if last is None or not len(last.time_ps):
            return Found(None, (), (), known_ps, min(known_ps, dropped))
        best = int(np.argmin(last.time_ps))
        time = int(last.time_ps[best])
        return self._found(steps, best, first, time, max(min(time, dropped), min(time, self.root_bound_ps)))

    def _these(self, at: int, length: int, order: Sequence[int] | None) -> list[Ints]:
        """The parts of so many tasks that may come next, all that are tried at once; an empty list is for any task."""
        long = self.lengths.get(length, [])
        if at < 0:
            return []
        if order is not None:
            is_row = list(order[at : at + length]) == list(range(order[at], order[at] + length))
            long = [part for part in long if is_row and self.parts.low[part] == order[at]]
        one = [] if length > 1 else [np.array([] if order is None else [order[at]], np.int64)]
        return [*one, *([np.array(long, np.int64)] if long else [])]

    def _layer(self, layers: Sequence[Layer | None], at: int, reached: Reached, chosen: Ints) -> Layer:
        rows = np.zeros((len(chosen), 2 * self.words + self.digits), np.uint64)
        for length in np.unique(reached.steps[chosen, 0]).tolist():
            write_rows(self.parts, layers[at - length], self.words, chosen, reached, length, rows)
        times = (reached.time_ps[chosen], reached.left_ps[chosen], reached.extra_macs[chosen])
        return Layer(rows, reached.keys[chosen], *times, reached.used[chosen])

    def _first(self, known_ps: int) -> Layer:
        """Every way to have what the caller gives in spaces."""
        root = int(self.bounds.share_ps.sum())
        beginnings: list[Beginning] = [(root, (0,) * self.count, {})]
        self.dropped_ps = NEVER
        if self.count ** len(self.problem.constants) > _MOST_BEGINNINGS:
            beginnings, self.dropped_ps = self._weights_first(beginnings[0]), root
        for storage in sorted(self.problem.given.difference(beginnings[0][2])):
            tries = [self._placed(each, storage, space, known_ps) for each in beginnings for space in range(self.count)]
            more = [each for each in tries if each is not None]
            ranked = sorted(more, key=lambda each: (each[0], sum(each[1])))
            if len(ranked) > _MOST_BEGINNINGS:
                self.dropped_ps = min(self.dropped_ps, ranked[_MOST_BEGINNINGS][0])
            beginnings = ranked[:_MOST_BEGINNINGS]
        rows = np.zeros((len(beginnings), 2 * self.words + self.digits), np.uint64)
        keys = np.zeros((len(beginnings), 2), np.uint64)
        for task in (index for index, each in enumerate(self.problem.tasks) if not each.before):
            rows[:, self.words + task // 64] |= np.uint64(1 << task % 64)
        for at, (_, _, placed) in enumerate(beginnings):
            for storage, space in placed.items():
                rows[at, 2 * self.words + storage // 16] |= np.uint64((space + 1) << 4 * (storage % 16))
                keys[at] ^= self.parts.place_keys[storage, space]
        zeros, left_ps = np.zeros(len(beginnings), np.int64), np.array([each[0] for each in beginnings], np.int64)
        alive = np.array([each[1] for each in beginnings], np.int64).reshape(-1, self.count)
        return Layer(rows, keys, zeros, left_ps, zeros.copy(), alive)

    def _placed(self, beginning: Beginning, storage: int, space: int, known_ps: int) -> Beginning | None:
        """The same with a storage in a space; None where it has no room, or leads to nothing better."""
        left, used, placed = beginning
        now = tuple(each + int(self.parts.size[storage, space]) * (at == space) for at, each in enumerate(used))
        both = {**placed, storage: space}
        rest = left if self.moves else self._left_ps(left, storage, placed, both)
        return (rest, now, both) if now[space] <= self.parts.room[space] and rest < known_ps else None

    def _weights_first(self, beginning: Beginning) -> list[Beginning]:
        """Ways to place many weights: in each memory those that save most time a byte, so many of them, and the rest in flash."""
        flash, ways = self.problem.flash, []
        for space in (each for each in range(self.count) if each != flash):
            gains = {each: self._gain_ps(each, space) / max(1, self.problem.size_bytes[each]) for each in self.problem.constants}
            ranked = sorted(gains, key=lambda each: (-gains[each], each))
            for count in sorted({len(ranked) * at // _WEIGHT_STEPS for at in range(_WEIGHT_STEPS + 1)}):
                now: Beginning | None = beginning
                for at, storage in enumerate(ranked):
                    now = None if now is None else self._placed(now, storage, space if at < count else flash, NEVER)
                ways += [now] if now is not None and now not in ways else []
        return ways or [beginning]

    def _gain_ps(self, storage: int, space: int) -> int:
        """How much less time the readers of weights take where these lie in a space, not in flash, and all else where it is fastest."""
        parts, gain = self.parts, 0
        for task in parts.readers[parts.readers_ptr[storage] : parts.readers_ptr[storage + 1]].tolist():
            rows = slice(parts.reads_ptr[task], parts.reads_ptr[task + 1])
            results = slice(parts.makes_ptr[task], parts.makes_ptr[task + 1])
            own = parts.read_ps[rows][parts.reads[rows] == storage][0]
            rest = int(parts.read_ps[rows].min(1).sum() - own.min() + parts.write_ps[results].min(1).sum())
            one, other = (max(int(parts.macs_ps[task]), rest + int(own[at])) for at in (self.problem.flash, space))
            gain += one - other
        return gain

    def _left_ps(self, left: int, storage: int, before: dict[int, int], after: dict[int, int]) -> int:
        """The least time of what is left, once it is known where a storage lies."""
        for reader in (index for index, task in enumerate(self.problem.tasks) if storage in task.reads):
            begin, reads = int(self.bounds.table_ptr[reader]), self.problem.tasks[reader].reads
            if begin >= 0 and left < NEVER:
                one, two = (
                    begin + sum((placed.get(read, -1) + 1) * (self.count + 1) ** at for at, read in enumerate(reads))
                    for placed in (before, after)
                )
                least = int(self.bounds.table[two])
                left = NEVER if least == NEVER else left + least - int(self.bounds.table[one])
        return left

    def _found(self, steps: Sequence[Ints], last: int, first: Layer, time: int, bound: int) -> Found:
        """The parts that led to a beginning. In the choice the last task of a cut stands for all of it."""
        order: list[int] = []
        runs: list[int] = []
        space_of: dict[int, int] = {}
        taken: dict[int, int] = {}
        rings: dict[int, int] = {}
        moved: list[tuple[int, int]] = []
        cuts: list[CutPart] = []
        at, state, parts = self.n, last, self.parts
        while at > 0:
            length, before, part, code, space, source, storage, target = steps[at - 1][state].tolist()
            tasks = range(int(parts.low[part]), int(parts.high[part]))
            order += reversed(tasks)
            runs.append(tasks[-1])
            for storage_made in reversed(parts.makes[parts.makes_ptr[part] : parts.makes_ptr[part + 1]].tolist()):
                code, space_of[storage_made] = divmod(code, self.count)
            taken |= {runs[-1]: source} if source >= 0 else {}
            rings |= {runs[-1]: space} if space >= 0 else {}
            moved.append((storage, target))
            cuts += self.cuts[part - self.n : part - self.n + 1] if part >= self.n else []
            at, state = at - length, before
        for storage in self.problem.given:
            word = int(first.rows[state, 2 * self.words + storage // 16])
            space_of[storage] = (word >> 4 * (storage % 16) & 15) - 1
        moves = tuple((step, storage, target) for step, (storage, target) in enumerate(reversed(moved)) if storage >= 0)
        choice = Choice(tuple(reversed(runs)), space_of, taken, moves, rings)
        return Found(choice, tuple(cuts), tuple(reversed(order)), time, bound)


def _ranked(reached: Reached, count: int) -> Ints:
    there = np.flatnonzero(reached.time_ps[:count] < NEVER)
    used = reached.used[there]
    keys = (*(used[:, space] for space in reversed(range(used.shape[1]))), used.sum(1), reached.time_ps[there] + reached.left_ps[there])
    return there[np.lexsort(keys)]


def parts_of(problem: EdgeProblem, room_bytes: Sequence[int], cuts: Sequence[CutPart]) -> EdgeParts:
    """A problem's tasks and cuts as arrays. Raises FormatError where its times are too long to be added up."""
    n, m, count = len(problem.tasks), len(problem.size_bytes), len(problem.spaces)
    spans = [*((at, at + 1) for at in range(n)), *((cut.first, cut.end) for cut in cuts)]
    tasks = [*problem.tasks, *(cut.task for cut in cuts)]
    readers = [[index for index in range(n) if storage in problem.tasks[index].reads] for storage in range(m)]
    users = [[index for index in range(n) if storage in (*problem.tasks[index].reads, *problem.tasks[index].makes)] for storage in range(m)]
    rng = np.random.default_rng(_SEED)
    move_ps = [
        [[0 if one == two else min(NEVER, problem.move_ps(storage, one, two)) for two in range(count)] for one in range(count)]
        for storage in range(m)
    ]
    parts = EdgeParts(
        np.array([first for first, _ in spans], np.int64),
        np.array([end for _, end in spans], np.int64),
        *_listed([task.before for task in tasks]),
        *_listed([task.reads for task in tasks]),
        _traffic(problem, [(task.reads, task.read_traffic, task.write_traffic) for task in tasks]),
        *_listed([task.makes for task in tasks]),
        _traffic(problem, [(task.makes, (), task.write_traffic) for task in tasks]),
        *_listed([task.takes for task in tasks]),
        np.array([[rounded_up(task.workspace_bytes, each.align_bytes) for each in problem.spaces] for task in tasks], np.int64),
        np.array([[min(NEVER, ring_ps(problem, task, space)) for space in range(count)] for task in tasks], np.int64),
        np.array([any(task.ring_bytes) for task in tasks]),
        np.array([min(NEVER, task.macs_ps) for task in tasks], np.int64),
        np.array([min(NEVER, task.constants_ps) for task in tasks], np.int64),
        np.array([0] * n + [cut.extra_macs for cut in cuts], np.int64),
        np.array([problem.beside_bytes(task, first, end) for task, (first, end) in zip(tasks, spans, strict=True)], np.int64),
        np.array([task.only_views for task in tasks]),
        np.array([task.only_views or problem.operators <= index < n for index, task in enumerate(tasks)]),
        *_listed([[later for later in range(n) if index in problem.tasks[later].before] for index in range(n)]),
        *_listed(users),
        *_listed(readers),
        np.array([storage in problem.kept for storage in range(m)]),
        np.array([problem.sizes_in(space) for space in range(count)], np.int64).T.copy(),
        np.array(room_bytes, np.int64),
        np.ones(count, np.bool_),
        np.array(move_ps, np.int64).reshape(m, count, count),
        rng.integers(0, 2**63, (n, 2), np.uint64),
        rng.integers(0, 2**63, (m, count, 2), np.uint64),
    )
    most = [float(each.max(initial=0)) for each in (parts.work_ps, parts.move_ps, parts.macs_ps, parts.constants_ps)]
    touched = max(len(task.reads) + len(task.makes) for task in tasks)
    worst = sum(most) + touched * float(max(parts.read_ps.max(initial=0), parts.write_ps.max(initial=0)))
    if n * worst > _MOST_PS:
        raise FormatError("rates: expected a network that takes no more than some days, got one that may take longer")
    if problem.flash >= 0:
        others = [storage for storage in range(m) if storage not in problem.constants]
        parts.size[others, problem.flash] = parts.work_bytes[:, problem.flash] = _NO_ROOM
        parts.room[problem.flash] = min(parts.room[problem.flash], _NO_ROOM - 1)
        parts.is_for_all[problem.flash] = False
        parts.move_ps[sorted(problem.constants)] = NEVER
    parts.move_ps[[task.makes[0] for task in problem.tasks[problem.operators :]]] = NEVER  # storages of parts stay
    return parts


def _listed(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Lists one behind the other, and where each begins."""
    return np.cumsum([0, *map(len, lists)]), np.array([each for one in lists for each in one], np.int64)


Traffic = Sequence[tuple[int, int]]


def _traffic(problem: EdgeProblem, lists: Sequence[tuple[Sequence[int], Traffic, Traffic]]) -> Ints:
    """[.., spaces] how long a part reads and writes each storage of its list."""
    rows = [
        [min(NEVER, _storage_ps(problem, space, storage, reads, writes)) for space in range(len(problem.spaces))]
        for storages, reads, writes in lists
        for storage in storages
    ]
    return np.array(rows, np.int64).reshape(-1, len(problem.spaces))


def _storage_ps(problem: EdgeProblem, space: int, storage: int, reads: Traffic, writes: Traffic) -> int:
    return sum(
        traffic_ps(problem, space, nbytes, writes=each is writes) for each in (reads, writes) for at, nbytes in each if at == storage
    )
