"""All plans of a model from one search: what a search sees does not depend on the limit, so that it answers every limit.

A planner is a process of its own, which ends before anything is timed. Its plans are files that the trainings load.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import lowtide
from bench.budget_settings import held_bytes, workload
from lowtide.remat.sweep import Sweep

_CONTEXT = multiprocessing.get_context("spawn")


class Once(Sweep):
    """A search whose answer is kept: later calls about the same problems get it again."""

    def explore(self, *args: Any, **kwargs: Any) -> Any:
        """As `Sweep.explore`."""
        kept: dict[str, Any] = self.__dict__.setdefault("kept", {})
        problems = args[0] if args else kwargs["problems"]
        asked = repr(
            [(each.cost_us.tolist(), each.problem.workspace_bytes.tolist(), each.problem.made_bytes.tolist()) for each in problems]
        )
        if asked not in kept:
            kept[asked] = super().explore(*args, **kwargs)
        return kept[asked]


@dataclass(frozen=True)
class Ends:
    """What lowtide knows of a model before any limit: bytes above what the caller holds, unless named otherwise."""

    resident_bytes: int
    eager_bytes: int
    least_bytes: int
    planning_s: float  # of the search that answers all limits, with capture and measuring


class Planner:
    """The plans of one model, made when asked for. A context manager: its files go with it."""

    def __init__(self, model: str, threads: int, patience_s: float, *, exact: bool = True) -> None:
        self._patience_s, self._folder = patience_s, TemporaryDirectory()
        self._known: dict[int, str] = {}
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs, model, threads, self._folder.name, exact), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.ends: Ends = self._answer()
        except BaseException:
            self.close()
            raise

    def plans(self, limits: Sequence[int]) -> Mapping[int, str]:
        """The file of the plan within each limit, in bytes above what the caller holds, 0 for none; "" where there is no plan."""
        for limit in set(limits) - self._known.keys():
            self._pipe.send(limit)
            self._known[limit] = self._answer()
        return {limit: self._known[limit] for limit in dict.fromkeys(limits)}

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the process and delete its files."""
        self._process.terminate()
        self._process.join()
        self._folder.cleanup()

    def _answer(self) -> Any:
        if not self._pipe.poll(self._patience_s):
            raise TimeoutError(f"no plan within {self._patience_s:.0f} s")
        return self._pipe.recv()


def _serve(pipe: Any, model: str, threads: int, folder: str, exact: bool) -> None:
    """In the process: search once for the ends, then for each limit that comes answer from that."""
    import torch

    from bench.models.workload import plain_sgd
    from lowtide import BudgetError, optimize

    torch.set_num_threads(threads)
    made = workload(model)
    start = time.perf_counter()
    step = optimize(
        made.model,
        made.batch,
        loss=made.loss,
        optimizer=plain_sgd(made.model),
        latency=1.0,
        exact=exact,
        planning=lowtide.Planning(progress=False),
    )
    plan, report = step.plan, step.plan.cost_report
    assert report is not None
    resident = plan.resident_bytes
    ends = Ends(resident, plan.eager_peak_bytes - resident, report.frontier[0][0] - resident, time.perf_counter() - start)
    if resident > held_bytes(made):
        raise AssertionError(f"the plan holds {resident} bytes, the caller {held_bytes(made)}")
    pipe.send(ends)
    while True:
        limit = pipe.recv()
        path = Path(folder) / f"{limit}.json"
        try:
            (step.at(resident + limit).plan if limit else plan).save(path)
            pipe.send(str(path))
        except BudgetError:
            pipe.send("")
