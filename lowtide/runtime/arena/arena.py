"""A step's own memory: its first run is recorded, its addresses are planned, later runs are served from one arena.

A step may have several programs (the first step of an optimizer makes its state, later ones update it); each has a recording of its own,
and all share the arena, as they never run at once. A program that keeps asking for something else than was recorded is recorded again,
after twice as many such runs each time.

A program for batches of many shapes is recorded at shapes that are larger than those before it in some dimension. What it asks for there
comes in one order with one pattern of lives, as a rule: then one placement of the largest of each request serves every shape below them. A
shape where that is not so has a recording of its own.

Nothing here decides what is right: the allocator serves no byte that is in use, so the numbers do not depend on recordings. What the
arena cannot give, PyTorch's allocator does.

An interrupt may come anywhere: whatever has begun ends (see allocator.py), and a plan is a program's own only once it is whole.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from lowtide.problems.placement import PlaceProblem
from lowtide.runtime.arena.allocator import OUTLIVES, Allocator, ArenaMemory, BusyError, Counts, Ints, Recorded, Script
from lowtide.runtime.copies import TensorLayout
from lowtide.runtime.program import NodeListener

Run = Callable[[], list[Any]]  # a program on its inputs: its outputs
# What a program will ask for, by node; what it needs beside that, in blocks of unknown pieces; and nodes whose results may be moved.
Guess = Callable[[], tuple[Recorded, Recorded, frozenset[int]]]
Place = Callable[[PlaceProblem], Any]  # finds addresses: offsets and arena_bytes, and lower_bound_bytes, below which there is no arena
Shape = tuple[int, ...]  # of the batches of a program that takes several: a number for each of its dimensions


@dataclass
class _Track:
    recorded: Recorded | None = None
    script: Script | None = None
    planned_bytes: int = 0
    lower_bound_bytes: int = 0
    deviations: int = 0  # since it was recorded
    patience: int = 1  # how many it takes to record it again
    shapes: tuple[Shape, ...] = ()  # at which it was recorded, where it serves several

    def covers(self, shape: Shape) -> bool:
        """Whether it was recorded at a shape that is nowhere smaller."""
        return any(all(one <= other for one, other in zip(shape, known, strict=True)) for known in self.shapes)

    def take_in(self, recorded: Recorded, shape: Shape) -> bool:
        """Have room for what was recorded at another shape, too; False where that has another pattern."""
        known = self.recorded
        if known is not None:
            if not (np.array_equal(known.born, recorded.born) and np.array_equal(known.died, recorded.died)):
                return False
            recorded = replace(known, size_bytes=np.maximum(known.size_bytes, recorded.size_bytes))
        self.recorded, self.script, self.shapes = recorded, None, (*self.shapes, shape)
        return True


class Arena:
    """The arena of one step. `place` finds addresses.

    `run` may be called by any thread; of two at once, the second goes without the arena.
    """

    def __init__(self, allocator: Allocator, place: Place) -> None:
        self._allocator, self._place = allocator, place
        self._tracks: dict[tuple[Hashable, Shape | None], _Track] = {}  # by program, and shape where one has a recording of its own
        self._region: ArenaMemory | None = None
        self._running = ctypes.c_int()  # a flag: up while a run is under way
        self._latest = _Track()
        self.generation = 0  # of its memory: addresses in it hold for as long as this is the same
        self.counts = Counts()  # of the latest run that was served
        self.recorded_runs = 0
        self.served_runs = 0
        self.runs_without: Counter[str] = Counter()  # by why
        self._refused = ""  # why there was no memory when it was last asked for
        self._pause, self._next_pause = 0, 1  # runs until it is asked for again, and how many it is after that: a process's needs change

    @property
    def nbytes(self) -> int:
        """The memory that the arena takes; 0 before the first run that is served, and where it was given back."""
        return 0 if self._region is None or not self._region.is_there else self._region.nbytes

    @property
    def planned_bytes(self) -> int:
        """What the latest planned program needs of it."""
        return self._latest.planned_bytes

    @property
    def lower_bound_bytes(self) -> int:
        """No arena for that program is smaller."""
        return self._latest.lower_bound_bytes

    @property
    def live_tensors(self) -> int:
        """How many tensors lie in it now: above 0 between steps only where something holds what a step made on its way."""
        return 0 if self._region is None else self._region.live

    def run(self, program: Hashable, call: Run, shape: Shape | None = None, guess: Guess | None = None) -> list[Any]:
        """The outputs of one run of `program`. None of them lies in the arena, where there is memory to copy them to.

        `shape` is that of the batch, where the program takes batches of several. With a guess a run that is recorded has an arena, too:
        a device that has no memory beside it could not run it otherwise.
        """
        guess = guess if self._allocator.on_gpu else None
        return self._allocator.alone(
            self._running, lambda: self._run(program, call, shape, guess), lambda: self._without("the same step was running", call)
        )

    def empty(self) -> None:
        """Give the memory back; the next run that is served takes it anew. While a run is under way nothing happens.

        Tensors that lie in it stay as they are, and their pages go with the last of them.
        """
        self._allocator.alone(self._running, self._drop, lambda: None)

    def _drop(self) -> None:
        self._region, self.generation = None, self.generation + (self._region is not None)

    def _run(self, program: Hashable, call: Run, shape: Shape | None, guess: Guess | None) -> list[Any]:
        if self._allocator.on_gpu and torch.cuda.is_current_stream_capturing():
            return self._without("a CUDA graph was captured", call)
        track = self._tracks.setdefault((program, None), _Track())
        if shape is not None:
            if (program, shape) in self._tracks:
                track = self._tracks[program, shape]
            elif not track.covers(shape):
                return self._record_at(track, program, shape, call, guess)
        if track.recorded is None:
            return self._record(track, call, guess)
        region = self._region_for(track, track.recorded)
        if region is None or track.script is None:
            return self._without(self._refused, call)
        return self._serve(track, region, track.script, call, (program, shape))

    def _record_at(self, track: _Track, program: Hashable, shape: Shape, call: Run, guess: Guess | None) -> list[Any]:
        """Record a shape that nothing covers; where it asks for memory in another pattern, on its own."""
        own = _Track()
        outputs = self._record(own, call, guess)
        if own.recorded is not None and not track.take_in(own.recorded, shape):
            self._tracks[program, shape] = own
        return outputs

    def _without(self, why: str, call: Run) -> list[Any]:
        self.runs_without[why] += 1
        return self._allocator.aside(call)

    def _record(self, track: _Track, call: Run, guess: Guess | None) -> list[Any]:
        guessed, region = _Track(), None
        if guess is not None:
            have_workspaces()
            requests, beside, which = guess()
            region = self._region_for(guessed, requests, beside)
            if region is not None:
                call = partial(NodeListener(self._allocator.library.lowtide_at, self._moved, which).along, call)
        if region is None and not self.live_tensors:
            self._drop()  # this run takes its memory elsewhere
        try:
            outputs, recorded = self._allocator.record(call, region, guessed.script)
        except BusyError as why:
            return self._without(str(why), call)
        if recorded is not None:
            track.script, track.recorded, track.deviations = None, recorded, 0
            self.recorded_runs += 1
        return _moved_out(outputs, region) if region is not None and region.live else outputs

    def _moved(self, item: Any) -> Any:
        """A result of a node, or a copy of it at the address that was guessed for it, where it lies elsewhere.

        A workspace of its size, which the node had asked for before, has lain there.
        """
        if not isinstance(item, torch.Tensor) or not self._allocator.library.lowtide_moves(item.untyped_storage().data_ptr()):
            return item
        return _copied(item, {})

    def _region_for(self, track: _Track, recorded: Recorded, beside: Recorded | None = None) -> ArenaMemory | None:
        """Memory that holds what is planned for a program; None where the system refuses it."""
        if self._pause:
            self._pause -= 1
            return None
        if self._region is not None and not self._region.is_there:
            self._drop()
        try:
            if track.script is None:
                self._plan(track, recorded, beside)
            fits = self._region is not None and self._region.nbytes >= track.planned_bytes
            # What a program's first run needs less than another's is given back: a limit leaves no room for both.
            if not fits or (beside is not None and self._region is not None and self._region.nbytes > track.planned_bytes):
                self._drop()  # goes first, unless something still lies in it
                self._allocator.library.lowtide_trim()
                self._region, self.generation = ArenaMemory(self._allocator, track.planned_bytes), self.generation + 1
            self._refused, self._next_pause = "", 1
        except (MemoryError, BusyError) as why:
            self._refused = str(why) or "there is no memory to plan an arena"
            self._pause, self._next_pause = self._next_pause, 2 * self._next_pause
        return self._region

    def _plan(self, track: _Track, recorded: Recorded, beside: Recorded | None) -> None:
        """Give every request that does not outlive its step an address, and what it needs beside those."""
        dying, align = np.flatnonzero(recorded.died >= 0), self._allocator.align_bytes
        sizes, born, died = recorded.size_bytes[dying], recorded.born[dying], recorded.died[dying]
        if beside is not None:
            sizes, born = np.concatenate([sizes, beside.size_bytes]), np.concatenate([born, beside.born])
            died = np.concatenate([died, beside.died])
        sizes = -(-sizes // align) * align
        addresses = self._place(PlaceProblem.of(sizes, born, died, align_bytes=align))
        offsets = np.full(len(recorded.size_bytes), OUTLIVES, np.int64)
        offsets[dying] = addresses.offsets[: len(dying)]
        guess: dict[str, Ints] = {}
        if beside is not None:
            spaces = [np.asarray(addresses.offsets[len(dying) :], np.int64), sizes[len(dying) :], beside.born]
            guess = {"steps": recorded.born, "spaces": np.stack(spaces, axis=1)}
        script = Script(self._allocator, recorded.size_bytes, offsets, up_to=bool(track.shapes), **guess)
        track.planned_bytes, track.lower_bound_bytes = addresses.arena_bytes, addresses.lower_bound_bytes
        track.script, self._latest = script, track

    def _serve(self, track: _Track, region: ArenaMemory, script: Script, call: Run, key: tuple[Hashable, Shape | None]) -> list[Any]:
        try:
            outputs, counts = self._allocator.serve(region, script, call)
        except BusyError as why:
            return self._without(str(why), call)
        self.counts, self._latest = counts, track
        self.served_runs += 1
        if counts.deviates:
            self._deviates(track, key)
        return _moved_out(outputs, region) if region.live else outputs

    def _deviates(self, track: _Track, key: tuple[Hashable, Shape | None]) -> None:
        """What is to be recorded again: a shape that goes another way than the others on its own, at once."""
        if track.shapes:
            self._tracks[key] = _Track()
            return
        track.deviations += 1
        if track.deviations >= track.patience:
            track.recorded, track.patience = None, 2 * track.patience


def have_workspaces() -> None:
    """Have cuBLAS ask for the workspaces that it keeps for this stream: they must not come to lie in an arena, nor in a graph's memory."""
    torch.cuda.current_blas_handle()
    with torch.no_grad(), torch.autocast("cuda", enabled=False):
        row = torch.zeros(16, 16, device="cuda", dtype=torch.float16)
        torch.addmm(row[0], row, row)


def _moved_out(outputs: list[Any], region: ArenaMemory) -> list[Any]:
    """Copies of the outputs that lie in the arena, which happens where a step deviates; outputs that share memory still do.

    Where there is no memory for copies they stay: what lies in the arena is safe there, and only takes its place from later steps.
    """
    copies: dict[int, torch.UntypedStorage] = {}
    try:
        return [_copied(each, copies) if _lies_in(each, region) else each for each in outputs]
    except (MemoryError, RuntimeError):
        return outputs


def _lies_in(item: Any, region: ArenaMemory) -> bool:
    if not isinstance(item, torch.Tensor) or item.layout is not torch.strided or item.device.type == "meta":
        return False
    return region.holds(item.untyped_storage().data_ptr())


def _copied(tensor: torch.Tensor, copies: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    storage = tensor.untyped_storage()
    copy = copies.setdefault(storage.data_ptr(), storage.clone())
    with torch.no_grad():
        return TensorLayout.of(tensor).on(copy)
