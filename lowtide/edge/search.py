"""The order, spaces and moves of least time, by bytes alive: a dynamic programme over what has run and where each live storage lies.

After k steps two beginnings that ran the same tasks, and left the same storages in the same spaces, go on alike: only the faster one is
kept. A beginning is dropped where its time and the least time of what is left reach the best time known. Where more beginnings are
left than the width, the least hopeful are set aside: the least that one of them could reach is then a lower bound of the whole.

The least time of what is left is the sum over tasks of the least time of each. That is over the places of its own storages which fit beside
one another, and leave room for what is alive at that task in every order. Where nothing may move, storages stay where they are in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from lowtide.edge.problem import EdgeProblem, task_ps
from lowtide.edge.residences import Choice

NEVER = 2**100  # picoseconds: it cannot be
_NARROW = 16  # beginnings a step where the effort is spent
_MOST_COMBINATIONS = 5_000  # of places of one task's storages; above that each is bounded alone


@dataclass(frozen=True)
class Found:
    """The best choice that one pass found, and what it proved."""

    choice: Choice | None  # None where none is better than what was known
    time_ps: int  # of it, or of what was known
    bound_ps: int  # no choice takes less


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to run a task, given where its inputs lie."""

    time_ps: int
    bytes_by_space: tuple[int, ...]  # that its new storages take up
    code: int  # of where they lie
    spaces: tuple[int, ...]  # of them, one after the other
    taken: int  # the storage that the first is written over, or -1


_State = tuple[int, int]  # what has run, where each live storage lies
_Entry = tuple[int, int, tuple[int, ...], int, _State | None, tuple[int, tuple[int, ...], int, int, int] | None]
# time, time of what is left, bytes alive by space, ready tasks, the state before, (task, spaces of what it made, taken, moved, to)


class Programme:
    """The dynamic programme of one problem, for capacities that may be asked for in turn."""

    def __init__(self, problem: EdgeProblem, room_bytes: Sequence[int], *, moves: bool) -> None:
        self.problem, self.room, self.moves = problem, tuple(room_bytes), moves
        self.count = len(problem.spaces)
        self.bits = self.count.bit_length()
        self.mask = (1 << self.bits) - 1
        self.sizes = [problem.sizes_in(space) for space in range(self.count)]
        tasks, m = problem.tasks, len(problem.size_bytes)
        self.users = [0] * m
        for index, task in enumerate(tasks):
            for storage in (*task.reads, *task.makes):
                self.users[storage] |= 1 << index
        self.needs = [sum(1 << before for before in task.before) for task in tasks]
        self.next = [[later for later, other in enumerate(tasks) if index in other.before] for index in range(len(tasks))]
        self.workspace = [
            tuple(-(-task.workspace_bytes // memory.align_bytes) * memory.align_bytes for memory in problem.spaces) for task in tasks
        ]
        self.readers = [[index for index, task in enumerate(tasks) if storage in task.reads] for storage in range(m)]
        self.steps = 0  # that were tried: options to run a task after a beginning, or to move beneath it
        self._options: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[_Option, ...]] = {}
        self._least: dict[tuple[int, tuple[int, ...]], int] = {}
        self.others = self._alive_in_every_order()
        self.free_ps = [self.least_ps(index, (-1,) * len(task.reads)) for index, task in enumerate(tasks)]
        self.root_bound_ps = min(sum(self.free_ps), NEVER)

    def _alive_in_every_order(self) -> list[list[int]]:
        """[n] the storages that are alive when a task runs, whatever the order, beside its own."""
        n = len(self.problem.tasks)
        before = [0] * n
        for index in self._topological():
            for earlier in self.problem.tasks[index].before:
                before[index] |= before[earlier] | 1 << earlier
        maker = {storage: index for index, task in enumerate(self.problem.tasks) for storage in task.makes}
        others: list[list[int]] = [[] for _ in range(n)]
        after = [sum(1 << later for later in range(n) if before[later] >> index & 1) for index in range(n)]
        for storage, users in enumerate(self.users):
            made_by = maker.get(storage)
            for index in range(n):
                there = made_by is None or before[index] >> made_by & 1
                if there and not users >> index & 1 and (storage in self.problem.kept or users & after[index]):
                    others[index].append(storage)
        return others

    def _topological(self) -> list[int]:
        done, order = 0, []
        waiting = list(range(len(self.needs)))
        while waiting:
            ready = [index for index in waiting if not self.needs[index] & ~done]
            order += ready
            done |= sum(1 << index for index in ready)
            waiting = [index for index in waiting if not done >> index & 1]
        return order

    def least_ps(self, index: int, known: tuple[int, ...]) -> int:
        """The least time of a task where some of its inputs lie in known spaces, -1 for the others; NEVER where it cannot run."""
        key = (index, known)
        if key not in self._least:
            self._least[key] = self._least_of(index, known)
        return self._least[key]

    def _least_of(self, index: int, known: tuple[int, ...]) -> int:
        task, count = self.problem.tasks[index], self.count
        free = [storage for storage, space in zip(task.reads, known, strict=True) if space < 0]
        if count ** (len(free) + len(task.makes)) > _MOST_COMBINATIONS:
            return self._least_apart(index, known)
        least = NEVER
        other_bytes = sum(min(sizes[storage] for sizes in self.sizes) for storage in self.others[index])
        for places in product(range(count), repeat=len(free)):
            rest = iter(places)
            inputs = tuple(next(rest) if space < 0 else space for space in known)
            used = [0] * count
            for storage, space in zip(task.reads, inputs, strict=True):
                used[space] += self.sizes[space][storage]
            for option in self._options_of(index, inputs, task.takes):
                left = [room - both - more for room, both, more in zip(self.room, used, option.bytes_by_space, strict=True)]
                if option.time_ps < least and min(left) >= 0 and sum(left) >= other_bytes and self._has_workspace(index, left):
                    least = option.time_ps
        return least

    def _has_workspace(self, index: int, left: Sequence[int]) -> bool:
        return any(free >= nbytes for free, nbytes in zip(left, self.workspace[index], strict=True))

    def _least_apart(self, index: int, known: tuple[int, ...]) -> int:
        """The same where each storage has all the room to itself."""
        task, space_of = self.problem.tasks[index], dict(zip(self.problem.tasks[index].reads, known, strict=True))
        best: dict[int, int] = {}
        for storage in (*task.reads, *task.makes):
            fitting = [space for space in range(self.count) if self.sizes[space][storage] <= self.room[space]]
            if space_of.get(storage, -1) >= 0:
                fitting = [space_of[storage]]
            if not fitting:
                return NEVER
            best[storage] = min(fitting, key=lambda space: self._alone_ps(index, storage, space))
        return task_ps(self.problem, task, best)

    def _alone_ps(self, index: int, storage: int, space: int) -> int:
        task = self.problem.tasks[index]
        alone = type(task)(
            task.name, (), (), (), (), tuple(each for each in task.read_traffic if each[0] == storage),
            tuple(each for each in task.write_traffic if each[0] == storage), 0, 0, 0, False,
        )  # fmt: skip
        return task_ps(self.problem, alone, {storage: space})

    def _options_of(self, index: int, inputs: tuple[int, ...], takes: tuple[int, ...]) -> tuple[_Option, ...]:
        """How a task may run with its inputs in these spaces, and its first output written over one of `takes`."""
        key = (index, inputs, takes)
        if key in self._options:
            return self._options[key]
        task, options = self.problem.tasks[index], []
        space_of = dict(zip(task.reads, inputs, strict=True))
        taken_in = {space_of[storage]: storage for storage in reversed(takes)}  # in one space one is as good as another
        for places in product(range(self.count), repeat=len(task.makes)):
            taken = taken_in.get(places[0], -1) if places else -1
            fresh = [0] * self.count
            for position, (storage, space) in enumerate(zip(task.makes, places, strict=True)):
                fresh[space] += 0 if position == 0 and taken >= 0 else self.sizes[space][storage]
            code = sum((space + 1) << (self.bits * storage) for storage, space in zip(task.makes, places, strict=True))
            time = task_ps(self.problem, task, space_of | dict(zip(task.makes, places, strict=True)))
            options.append(_Option(time, tuple(fresh), code, places, taken))
        self._options[key] = tuple(options)
        return self._options[key]

    def find(self, known_ps: int, *, width: int, max_steps: int, order: Sequence[int] | None = None) -> Found:
        """The best choice that takes less than `known_ps`, over all orders or in one; no more than `width` beginnings a step.

        With an order the bound is of that order only.
        """
        layer, layers, dropped, until = self._first(known_ps), [], NEVER, self.steps + max_steps
        for step in range(len(self.problem.tasks)):
            layers.append(layer)
            after: dict[_State, _Entry] = {}
            for state, entry in layer.items():
                for task in self._tasks_to_run(entry[3]) if order is None else (order[step],):
                    self._run(state, entry, task, after, known_ps)
            most = width if self.steps < until else min(width, _NARROW)
            if len(after) > most:
                ranked = sorted(after.items(), key=lambda item: (item[1][0] + item[1][1], sum(item[1][2]), item[1][2]))
                dropped = min(dropped, ranked[most][1][0] + ranked[most][1][1])
                after = dict(ranked[:most])
            layer = after
        if not layer:
            return Found(None, known_ps, min(known_ps, dropped))
        last = min(layer, key=lambda state: layer[state][0])
        time = layer[last][0]
        return Found(self._choice([*layers, layer], last), time, max(min(time, dropped), min(time, self.root_bound_ps)))

    def _tasks_to_run(self, ready: int) -> list[int]:
        """The tasks that may run next; a task that only makes views, and so changes nothing, at once."""
        tasks = []
        while ready:
            lowest = ready & -ready
            index = lowest.bit_length() - 1
            if self.problem.tasks[index].only_views and not self.problem.tasks[index].workspace_bytes:
                return [index]
            tasks.append(index)
            ready ^= lowest
        return tasks

    def _first(self, known_ps: int) -> dict[_State, _Entry]:
        """Every way to have what the caller gives in spaces."""
        ready = sum(1 << index for index, needs in enumerate(self.needs) if not needs)
        beginnings: dict[_State, _Entry] = {(0, 0): (0, self.root_bound_ps, (0,) * self.count, ready, None, None)}
        for storage in sorted(self.problem.given):
            more: dict[_State, _Entry] = {}
            for (_, code), entry in beginnings.items():
                for space in range(self.count):
                    used = list(entry[2])
                    used[space] += self.sizes[space][storage]
                    placed = code | (space + 1) << (self.bits * storage)
                    left = entry[1] if self.moves else self._left_ps(entry[1], storage, placed, 0)
                    if used[space] <= self.room[space] and left < known_ps:
                        more[0, placed] = (0, left, tuple(used), ready, None, None)
            beginnings = dict(sorted(more.items(), key=lambda item: (item[1][1], sum(item[1][2])))[:_MOST_COMBINATIONS])
        return beginnings

    def _left_ps(self, left: int, storage: int, placed: int, done: int) -> int:
        """The least time of what is left, once it is known where a storage lies."""
        for reader in self.readers[storage]:
            if not done >> reader & 1:
                reads = self.problem.tasks[reader].reads
                after = tuple((placed >> (self.bits * each) & self.mask) - 1 for each in reads)
                before = tuple(-1 if each == storage else space for each, space in zip(reads, after, strict=True))
                left += self.least_ps(reader, after) - self.least_ps(reader, before)
        return left

    def _run(self, state: _State, entry: _Entry, index: int, after: dict[_State, _Entry], known_ps: int) -> None:
        """All ways to run a task after a beginning, and to move one storage beneath it."""
        done, code = state
        time, left, used, ready, _, _ = entry
        task, bits, mask, users, kept = self.problem.tasks[index], self.bits, self.mask, self.users, self.problem.kept
        inputs = tuple((code >> (bits * storage) & mask) - 1 for storage in task.reads)
        now = done | 1 << index
        ended = [users[storage] & ~now == 0 and storage not in kept for storage in task.reads]
        dying = [(storage, space) for storage, space, over in zip(task.reads, inputs, ended, strict=True) if over]
        if task.takes and dying:
            dead = {storage for storage, _ in dying}
            takes = tuple(storage for storage in task.takes if storage in dead)
        else:
            takes = ()
        ready &= ~(1 << index)
        for later in self.next[index]:
            if not self.needs[later] & ~now:
                ready |= 1 << later
        base = left - (self.free_ps[index] if self.moves else self.least_ps(index, inputs))
        gone = 0
        for storage, space in dying:
            gone |= (space + 1) << (bits * storage)
        options = self._options_of(index, inputs, takes)
        self.steps += len(options)
        for option in options:
            during = tuple(map(int.__add__, used, option.bytes_by_space))
            free = tuple(map(int.__sub__, self.room, during))
            if min(free) < 0 or (task.workspace_bytes and not self._has_workspace(index, free)):
                continue
            total, rest = time + option.time_ps, base
            placed = (code ^ gone) | option.code
            if not self.moves:
                # One by one: what is known of a later task grows with each storage.
                seen = code ^ gone
                for storage, space in zip(task.makes, option.spaces, strict=True):
                    seen |= (space + 1) << (bits * storage)
                    rest = self._left_ps(rest, storage, seen, now)
            if total + rest >= known_ps:
                continue
            alive = list(during)
            for storage, space in dying:
                alive[space] -= self.sizes[space][storage] if storage != option.taken else 0
            for storage, space in zip(task.makes, option.spaces, strict=True):
                if not users[storage] & ~now and storage not in kept:
                    placed ^= (space + 1) << (bits * storage)
                    alive[space] -= self.sizes[space][storage]
            reached = (total, rest, tuple(alive), ready, state, (index, option.spaces, option.taken, -1, -1))
            self._add(after, (now, placed), reached)
            if self.moves and not task.only_views and now != (1 << len(self.needs)) - 1:
                self._move(after, (now, placed), reached, free, option, known_ps)

    def _move(
        self, after: dict[_State, _Entry], state: _State, entry: _Entry, free: tuple[int, ...], option: _Option, known_ps: int
    ) -> None:
        """The same with each storage in turn moved beneath the step, where both of its places have room."""
        (now, placed), (total, rest, alive, ready, before, step) = state, entry
        if step is None:
            return
        makes = self.problem.tasks[step[0]].makes
        storage, code = 0, placed
        while code:
            space = (code & self.mask) - 1
            if space >= 0 and storage not in makes:
                self.steps += self.count - 1
                for target in range(self.count):
                    nbytes = self.sizes[target][storage]
                    if target == space or nbytes > free[target]:
                        continue
                    left = [each - nbytes * (at == target) for at, each in enumerate(free)]
                    if self.problem.tasks[step[0]].workspace_bytes and not self._has_workspace(step[0], left):
                        continue
                    move_ps = self.problem.move_ps(storage, space, target)
                    moved_ps = total + (max(0, move_ps - option.time_ps) if self.problem.dma else move_ps)
                    if moved_ps + rest < known_ps:
                        there = list(alive)
                        there[space] -= self.sizes[space][storage]
                        there[target] += nbytes
                        shifted = placed ^ ((space + 1) ^ (target + 1)) << (self.bits * storage)
                        self._add(after, (now, shifted), (moved_ps, rest, tuple(there), ready, before, (*step[:3], storage, target)))
            storage, code = storage + 1, code >> self.bits

    @staticmethod
    def _add(after: dict[_State, _Entry], state: _State, entry: _Entry) -> None:
        known = after.get(state)
        if known is None or entry[0] < known[0]:
            after[state] = entry

    def _choice(self, layers: list[dict[_State, _Entry]], last: _State) -> Choice:
        """The steps that led to a state."""
        order: list[int] = []
        space_of: dict[int, int] = {}
        taken: dict[int, int] = {}
        moves: list[tuple[int, int, int]] = []
        state = last
        for step in range(len(layers) - 1, 0, -1):
            entry = layers[step][state]
            before, action = entry[4], entry[5]
            if before is None or action is None:
                break
            index, spaces, source, storage, target = action
            order.append(index)
            space_of.update(zip(self.problem.tasks[index].makes, spaces, strict=True))
            if source >= 0:
                taken[index] = source
            if storage >= 0:
                moves.append((step - 1, storage, target))
            state = before
        for storage in self.problem.given:
            space_of[storage] = (state[1] >> (self.bits * storage) & self.mask) - 1
        return Choice(tuple(reversed(order)), space_of, taken, tuple(reversed(moves)))
