"""Bodies that inductor compiles beside one another: in this process and in some of their own.

    takes   bodies as texts, by key, and what compiles one in this process
    leaves  what is compiled in the cache; by key, why there is nothing

Inductor's Python takes a quarter of the time and is not made for threads, so that each process compiles a body at a time. Of processes
there are as many as torch's own setting allows (TORCHINDUCTOR_COMPILE_THREADS), and no more than pay for importing torch. One that cannot
be had, or that ends before it has answered, leaves its body to this one.

A body for a GPU is compiled in this process: another one would take memory of the GPU.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from lowtide.cost.trial_process import TrialProcess, WorkerExitedError
from lowtide.regions.inductor import begin, has_compiled, processes
from lowtide.runtime.libraries import NativeError

_MODULE = "lowtide.regions.worker"
_LIMIT_S = 300.0  # for one body
_BODIES = 4  # for which it pays to start a process
_MOST = 8  # processes: each takes some 400 MiB

_begun: list[TrialProcess] = []  # at most one, which begins while its bodies are not known yet


@contextmanager
def begun_ahead(device: str) -> Iterator[None]:
    """Meanwhile what needs no body goes on: inductor looks at the processor, and compiles what all kernels share."""
    if device != "cpu":
        yield
        return
    begin()
    if not has_compiled() and processes() > 1 and not _begun:
        with suppress(WorkerExitedError):
            _begun.append(_started(is_first=True))
    try:
        yield
    finally:
        while _begun:
            _begun.pop().end()


def compile_all(texts: Mapping[str, str], here: Callable[[str], object], say: Callable[[float], object]) -> dict[str, str]:
    """Have bodies compiled; for those that could not be, why."""
    jobs = _Jobs(texts)
    workers: list[TrialProcess] = []
    try:
        for _ in range(min(processes(), _MOST, -(-len(texts) // _BODIES)) - 1):
            with suppress(WorkerExitedError):
                workers.append(_begun.pop() if _begun else _started(is_first=False))
                threading.Thread(target=jobs.feed, args=(workers[-1],), name="lowtide-compiles", daemon=True).start()
        jobs.work(here, say)
    finally:
        jobs.drop()
        for worker in workers:
            worker.end()
    return jobs.reasons


def _started(*, is_first: bool) -> TrialProcess:
    setup: dict[str, Any] = {"limit_s": _LIMIT_S, "threads": torch.get_num_threads(), "is_first": is_first}
    return TrialProcess(setup, _MODULE, waits=False)


class _Jobs:
    """Bodies that nobody compiles yet, and what became of the others."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.reasons: dict[str, str] = {}
        self._texts, self._open, self._busy = texts, deque(texts), 0
        self._changed = threading.Condition()

    def work(self, here: Callable[[str], object], say: Callable[[float], object]) -> None:
        """Compile in this process, until all is done, here or elsewhere."""
        while (key := self._next(waits=True)) is not None:
            try:
                here(key)
            except NativeError as error:
                self.reasons[key] = str(error)
            self._is_done()
            say(1 - (len(self._open) + self._busy) / len(self._texts))

    def feed(self, worker: TrialProcess) -> None:
        """Have another process compile, for as long as there is something to do, and it does it."""
        try:
            worker.begin()
            while (key := self._next(waits=False)) is not None:
                answered = False
                try:
                    reply = worker.ask({"key": key, "body": self._texts[key]}, _LIMIT_S)
                    if "failure" in reply:
                        self.reasons[key] = str(reply["failure"])
                    answered = True
                finally:  # whatever has ended it: who waits for all is not left waiting
                    self._is_done(left=None if answered else key)
        except WorkerExitedError:
            return

    def drop(self) -> None:
        """Nobody begins anything any more."""
        with self._changed:
            self._open.clear()

    def _next(self, *, waits: bool) -> str | None:
        """What is to be compiled next; None where there is nothing, or will be nothing once all are done that are being compiled."""
        with self._changed:
            while waits and self._busy and not self._open:
                self._changed.wait()
            if not self._open:
                return None
            self._busy += 1
            return self._open.popleft()

    def _is_done(self, left: str | None = None) -> None:
        with self._changed:
            self._busy -= 1
            if left is not None:
                self._open.append(left)
            self._changed.notify_all()
