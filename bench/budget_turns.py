"""Trainings that take turns: each setting is a process of its own, all of a group live at once, and are told one after another to step.

Times of processes that run one after another differ by a fifth on a shared machine, as the machine does. Of two that take turns, the
ratio of adjacent turns is what counts: whatever slows both cancels out.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Literal

from bench.budget_settings import Setting, Training, training

_WARM_UP = 2
_CONTEXT = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Turn:
    """One step."""

    wall_s: float
    cpu_s: float
    faults: int  # pages that the system had to map


class Worker:
    """A process that trains one model in one setting, a step at a time. It is told to start at once and asked later whether it has."""

    def __init__(self, model: str, setting: Setting, threads: int) -> None:
        self.setting, self.turns = setting, list[Turn]()
        self.told: dict[str, Any] = {}
        self.failed = ""
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs, model, setting, threads), daemon=True)
        self._process.start()
        theirs.close()

    def ready(self, patience_s: float) -> bool:
        """Wait until it has taken its first steps and measured its peak; False if it fails or takes too long, and then it is gone."""
        found = self._answer(patience_s)
        if found is not None:
            self.told = found
        return not self.failed

    def step(self, patience_s: float = 600.0) -> None:
        """Take one turn."""
        self._pipe.send("step")
        found = self._answer(patience_s)
        if found is not None:
            self.turns.append(found)

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.terminate()
        self._process.join()

    def _answer(self, patience_s: float) -> Any:
        try:
            if not self._pipe.poll(patience_s):
                self.failed = f"took more than {patience_s:.0f} s"
            else:
                found = self._pipe.recv()
                if not isinstance(found, str):
                    return found
                self.failed = found
        except (EOFError, ConnectionError):
            self.failed = "the process ended"
        self.close()
        return None


def _serve(pipe: Connection, model: str, setting: Setting, threads: int) -> None:
    """In the worker: make the training, measure its peak, then take a step whenever told to."""
    try:
        import torch

        torch.set_num_threads(threads)
        made = training(model, setting)
        for _ in range(_WARM_UP):
            made.step()
        pipe.send({**made.told, "peak_bytes": made.peak_bytes()})
        while pipe.recv() == "step":
            pipe.send(_turn(made))
    except (EOFError, ConnectionError):
        return  # no more is wanted
    except Exception as error:  # told to whoever started this process
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {error}".splitlines()[0][:200])


def _turn(made: Training) -> Turn:
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    wall, cpu = time.perf_counter(), time.process_time()
    made.step()
    return Turn(time.perf_counter() - wall, time.process_time() - cpu, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)


@dataclass
class Group:
    """Workers of one model that live at the same time. A context manager: they end with it."""

    model: str
    threads: int
    patience_s: float
    starts: int = 2  # processes that are made ready at the same time
    workers: list[Worker] = field(default_factory=list)

    def start(self, settings: Sequence[Setting]) -> list[Worker]:
        """Workers in these settings, ready or failed."""
        begun: list[Worker] = []
        for first in range(0, len(settings), self.starts):
            part = [Worker(self.model, setting, self.threads) for setting in settings[first : first + self.starts]]
            for worker in part:
                worker.ready(self.patience_s)
            begun += part
        self.workers += begun
        return begun

    def take_turns(self, rounds: int, seconds: float) -> None:
        """Rounds of one step each, always in the same order; fewer where they take longer than so many seconds, but at least three."""
        deadline = time.monotonic() + seconds
        for turn in range(rounds + 1):
            for worker in self.alive():
                worker.step()
            if turn == 0:
                for worker in self.alive():
                    worker.turns.clear()  # the first turn brings each one's memory and caches back
            elif turn >= 3 and time.monotonic() > deadline:
                return

    def alive(self) -> list[Worker]:
        """Workers that have not failed."""
        return [worker for worker in self.workers if not worker.failed]

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self.alive():
            worker.close()


@dataclass(frozen=True)
class Ratio:
    """How many times as long one setting takes as another, over adjacent turns."""

    median: float
    spread: float  # half the distance between the quartiles

    @classmethod
    def of(cls, mine: Iterable[Turn], theirs: Iterable[Turn], clock: Literal["wall_s", "cpu_s"]) -> Ratio:
        """Of the turns of two workers of one group."""
        ratios = [getattr(one, clock) / getattr(two, clock) for one, two in zip(mine, theirs, strict=False)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(middle, (high - low) / 2)


def median_ms(turns: Sequence[Turn], of: Callable[[Turn], float]) -> float:
    """The median of a clock, in milliseconds."""
    return statistics.median(map(of, turns)) * 1e3
