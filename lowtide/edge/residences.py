"""What was chosen (order, spaces, in-place results, moves), as blocks with lives, and their addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from lowtide.edge.plan import EdgeBlock, Move, rounded_up
from lowtide.edge.problem import EdgeProblem, task_ps
from lowtide.placement.auto import Auto
from lowtide.problems import Status
from lowtide.problems.placement import PlaceProblem


@dataclass(frozen=True)
class Choice:
    """All that is decided but the addresses."""

    order: tuple[int, ...]
    space_of: Mapping[int, int]  # by storage: where it lies at first
    taken: Mapping[int, int]  # by task: the storage that its first output is written over
    moves: tuple[tuple[int, int, int], ...] = ()  # (step, storage, space): beneath this step it is copied to the space
    rings: Mapping[int, int] = field(default_factory=dict)  # by task that is a cut: where its workspace lies


@dataclass
class _Residence:
    """A storage, and those written over it, for as long as they lie in one place."""

    space: int
    start: int
    end: int
    size_bytes: int
    storages: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Laid:
    """Blocks with addresses, or the spaces that were too small for them."""

    blocks: tuple[EdgeBlock, ...]
    moves: tuple[Move, ...]
    excess_bytes: tuple[int, ...]  # by space: how much of the smallest arena found lies above its room
    statuses: tuple[Status, ...]  # by space, of its placement


class _Walk:
    """The residences of a choice, step by step."""

    def __init__(self, problem: EdgeProblem, choice: Choice) -> None:
        self.problem, self.choice = problem, choice
        self.residences: list[_Residence] = []
        self.current: dict[int, int] = {}  # by storage
        self.moves: list[Move] = []
        self.time_ps = 0
        users = _users(problem)
        step_of = accumulate((index < problem.operators for index in choice.order), initial=0)
        beneath = {at: (storage, space) for step, at in enumerate(step_of) for before, storage, space in choice.moves if before == step}
        for index in range(problem.operators, len(problem.tasks)):
            users[problem.tasks[index].makes[0]].discard(index)
        for storage in sorted(problem.given):
            self._begin(storage, choice.space_of[storage], 0)
        for step, index in enumerate(operators_of(problem, choice)):
            task = problem.tasks[index]
            self._make(step, index)
            touched = (*task.reads, *task.makes)
            for storage in touched:
                if storage not in self.current:  # parts of it: it begins with the first that is written
                    self._begin(storage, choice.space_of[storage], step)
            for storage in touched:
                residence = self.residences[self.current[storage]]
                residence.end = max(residence.end, step + 1)
                users[storage].discard(index)
            space_of = {storage: self.residences[self.current[storage]].space for storage in touched}
            step_ps = task_ps(problem, task, space_of, choice.rings.get(index, 0))
            self.time_ps += step_ps
            if step in beneath:
                self._move(step, *beneath[step], step_ps)
            for storage in self.current:
                if users[storage] or storage in problem.kept:
                    self.residences[self.current[storage]].end = step + 1

    def _begin(self, storage: int, space: int, step: int) -> None:
        self.current[storage] = len(self.residences)
        self.residences.append(_Residence(space, step, step + 1, self.problem.size_bytes[storage], [storage]))

    def _make(self, step: int, index: int) -> None:
        for position, storage in enumerate(self.problem.tasks[index].makes):
            taken = self.choice.taken.get(index) if position == 0 else None
            if taken is None:
                self._begin(storage, self.choice.space_of[storage], step)
            else:
                self.current[storage] = self.current[taken]
                self.residences[self.current[taken]].storages.append(storage)

    def _move(self, step: int, storage: int, space: int, step_ps: int) -> None:
        source = self.current[storage]
        self.residences[source].end = step + 1
        self._begin(storage, space, step)
        self.moves.append(Move(source, self.current[storage], step + 1))
        move_ps = self.problem.move_ps(storage, self.residences[source].space, space)
        self.time_ps += max(0, move_ps - step_ps) if self.problem.dma else move_ps


def operators_of(problem: EdgeProblem, choice: Choice) -> tuple[int, ...]:
    """The order of a choice without the tasks that make storages of parts."""
    return tuple(index for index in choice.order if index < problem.operators)


def _users(problem: EdgeProblem) -> list[set[int]]:
    users: list[set[int]] = [set() for _ in problem.size_bytes]
    for index, task in enumerate(problem.tasks):
        for storage in (*task.reads, *task.makes):
            users[storage].add(index)
    return users


def time_ps(problem: EdgeProblem, choice: Choice) -> int:
    """How long a choice takes, by the model."""
    return _Walk(problem, choice).time_ps


def lay(problem: EdgeProblem, choice: Choice, room_bytes: Sequence[int]) -> Laid:
    """Addresses for all blocks of a choice, in spaces that have so much room."""
    walk = _Walk(problem, choice)
    residences = [*walk.residences, *_workspaces(problem, choice, walk.residences, room_bytes)]
    offsets, excess, statuses = [0] * len(residences), [], []
    for space, room in enumerate(room_bytes):
        inside = [index for index, residence in enumerate(residences) if residence.space == space]
        align = problem.spaces[space].align_bytes
        buffers = PlaceProblem.of(
            [rounded_up(residences[index].size_bytes, align) for index in inside],
            [residences[index].start for index in inside],
            [residences[index].end for index in inside],
            align_bytes=align,
        ) if inside else None  # fmt: skip
        placement = None if buffers is None else _PLACER.place(buffers)
        if placement is not None:
            for index, offset in zip(inside, placement.offsets, strict=True):
                offsets[index] = offset
        excess.append(0 if placement is None else max(0, placement.arena_bytes - room))
        statuses.append(Status.OPTIMAL if placement is None else placement.status)
    blocks = tuple(
        EdgeBlock(
            tuple(tensor for storage in residence.storages for tensor in problem.tensors[storage]),
            residence.space, offset, residence.size_bytes, residence.start, residence.end, _starts(problem, residence),
        )
        for residence, offset in zip(residences, offsets, strict=True)
    )  # fmt: skip
    return Laid(blocks, tuple(walk.moves), tuple(excess), tuple(statuses))


def _starts(problem: EdgeProblem, residence: _Residence) -> tuple[int, ...]:
    starts = tuple(start for storage in residence.storages for start in problem.starts[storage])
    return starts if any(starts) else ()


_PLACER = Auto(max_nodes=200_000)


def _workspaces(problem: EdgeProblem, choice: Choice, residences: list[_Residence], room_bytes: Sequence[int]) -> list[_Residence]:
    """A residence for the workspace of each step: where it was chosen, else in the space that has most room left then."""
    workspaces = []
    for step, index in enumerate(operators_of(problem, choice)):
        nbytes = problem.tasks[index].workspace_bytes
        if nbytes:
            left = list(room_bytes)
            for residence in residences:
                if residence.start <= step < residence.end:
                    left[residence.space] -= rounded_up(residence.size_bytes, problem.spaces[residence.space].align_bytes)
            able = [each for each in range(len(left)) if each != problem.flash]
            space = choice.rings.get(index, max(able, key=lambda each: (left[each], -each)))
            workspaces.append(_Residence(space, step, step + 1, nbytes))
    return workspaces
