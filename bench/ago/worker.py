"""A process for each contender: it loads one network after another, and runs it in bursts when it is told to."""

from __future__ import annotations

import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.ago.contenders import make

_CONTEXT = multiprocessing.get_context("spawn")
_WARM_UP = 3
_BURST_S = 0.06
_MOST_RUNS = 400


class Worker:
    """The process of one contender. Everything that it is asked may fail: then `failed` says why, until the next network."""

    def __init__(self, contender: str, threads: int, folder: Path) -> None:
        self.contender, self.failed = contender, ""
        self.bursts_us: list[float] = []
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs, contender, threads, folder), daemon=True)
        self._process.start()
        theirs.close()

    def begin_load(self, name: str) -> None:
        """Tell it to load a network."""
        self.failed, self.bursts_us = "", []
        try:
            self._pipe.send(("load", name))
        except (BrokenPipeError, ConnectionError):
            self.failed = "the process ended"

    def loaded(self, patience_s: float) -> dict[str, Any]:
        """Wait for that: its first result ("output") and "ready_s"; nothing where it failed."""
        return {} if self.failed else self._answer(patience_s) or {}

    def burst(self) -> None:
        """Run for some 60 ms; the median of a run is added to `bursts_us`."""
        self._pipe.send(("burst", ""))
        found = self._answer(120.0)
        if found is not None:
            self.bursts_us.append(found)

    def median_us(self) -> float:
        """Of its bursts."""
        return statistics.median(self.bursts_us)

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.terminate()
        self._process.join(5.0)
        if self._process.is_alive():  # it hangs where no signal is heard
            self._process.kill()
            self._process.join()

    def _answer(self, patience_s: float) -> Any:
        if not self._pipe.poll(patience_s):
            self.failed = f"took more than {patience_s:.0f} s"
            return None
        try:
            found = self._pipe.recv()
        except (EOFError, ConnectionError):
            self.failed = "the process ended"
            return None
        if isinstance(found, str):
            self.failed = found
            return None
        return found


def _serve(pipe: Connection, contender: str, threads: int, folder: Path) -> None:
    run: Callable[[], Any] | None = None
    while True:
        try:
            what, name = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            if what == "load":
                run = None  # the network before goes first
                start = time.perf_counter()
                run = make(contender, name, threads, folder)
                output = run().copy()
                pipe.send({"ready_s": time.perf_counter() - start, "output": output})
            elif run is not None:
                pipe.send(_burst(run))
            else:
                pipe.send("no network is loaded")
        except Exception as error:  # sent to whoever asked
            traceback.print_exc()
            pipe.send(f"{type(error).__name__}: {error}".splitlines()[0][:200])


def _burst(run: Callable[[], Any]) -> float:
    """The median time of a run, in microseconds, once caches are warm again."""
    for _ in range(_WARM_UP):
        run()
    taken: list[float] = []
    end = time.perf_counter() + _BURST_S
    while (time.perf_counter() < end and len(taken) < _MOST_RUNS) or len(taken) < 3:
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e6
