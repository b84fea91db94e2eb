"""Each way of training is a process of its own, which starts with caches of its own, and steps when it is told to."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from bench.dynamic.task import Task

_CONTEXT = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Started:
    """What the first time through all batches took, compilation and all."""

    first_s: float  # until the first step was done
    all_s: float
    compilations: int


class Worker:
    """A process that trains a task in one way. A failure ends it, and is kept as text."""

    def __init__(self, name: str, task: Task, limit_bytes: int, threads: int) -> None:
        self.name, self.failed = name, ""
        self.started: Started | None = None
        self.seconds: list[list[float]] = []  # by round and batch
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs, name, task, limit_bytes, threads), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, patience_s: float) -> bool:
        """Once through all batches; False if that fails or takes too long."""
        self.started = self._asked(("start", 0), patience_s)
        return self.started is not None

    def step(self, index: int, patience_s: float = 300.0) -> float:
        """The seconds of one step; inf if it fails."""
        found = self._asked(("step", index), patience_s)
        return float("inf") if found is None else float(found)

    def peak_bytes(self, index: int, patience_s: float = 300.0) -> int | None:
        """The most that a step takes by the allocator's record, with parameters and the optimizer's state; one more step trains."""
        found: int | None = self._asked(("peak", index), patience_s)
        return found

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.terminate()
        self._process.join()

    def _asked(self, question: tuple[str, int], patience_s: float) -> Any:
        if self.failed:
            return None
        try:
            self._pipe.send(question)
            if not self._pipe.poll(patience_s):
                self.failed = f"took more than {patience_s:.0f} s"
                return None
            found = self._pipe.recv()
        except (EOFError, ConnectionError):
            found = "the process ended"
        if isinstance(found, str):
            self.failed = found
            return None
        return found


def _serve(pipe: Connection, name: str, task: Task, limit_bytes: int, threads: int) -> None:
    """In the worker."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("LOWTIDE_CACHE", "TORCHINDUCTOR_CACHE_DIR"):
                os.environ[cache] = os.path.join(folder, cache.lower())
            served = _Served(name, task, limit_bytes, threads)
            while True:
                question, index = pipe.recv()
                pipe.send(getattr(served, question)(index))
    except (EOFError, ConnectionError):
        return  # no more is wanted
    except Exception as error:  # told to whoever started this process
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {error}".splitlines()[0][:200])


class _Served:
    """What a worker can be asked for."""

    def __init__(self, name: str, task: Task, limit_bytes: int, threads: int) -> None:
        import torch

        from bench.dynamic.task import model
        from bench.dynamic.variants import trained

        torch.set_num_threads(threads)
        model()  # so that what it imports is no part of the first step
        self.task = task
        self._trained = lambda: trained(name, task, limit_bytes)

    def start(self, _: int) -> Started:
        self.batches = [self.task.batch(index) for index in range(self.task.steps)]
        begun = time.perf_counter()
        self.made = self._trained()
        lengths = [self.made.length(max(each)) for each in self.task.lengths]
        self.batches = [self.task.batch(index, length) for index, length in enumerate(lengths)]
        ends = []
        for batch in self.batches:
            self.made.step(batch)
            ends.append(time.perf_counter() - begun)
        return Started(ends[0], ends[-1], self.made.compilations())

    def step(self, index: int) -> float:
        begun = time.perf_counter()
        self.made.step(self.batches[index])
        return time.perf_counter() - begun

    def peak(self, index: int) -> int:
        from lowtide.cost.profiler import measure_memory

        batch = self.batches[index]
        held = self.made.held_bytes() + sum(each.untyped_storage().nbytes() for each in batch.values())
        return held + measure_memory(lambda: self.made.step(batch)).above_bytes
