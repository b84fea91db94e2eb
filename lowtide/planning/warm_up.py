"""Kernels made ready before a search: loaded from disk, or compiled by two processes at once where that was never done here.

numba compiles in Python, so that threads would not help: a second process compiles half of what is needed, and this one finds that on disk.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from lowtide.base.kernels import can_be_cached, is_at_hand
from lowtide.remat.blocks.seeds import warm_up_seeds
from lowtide.remat.evict.eviction import warm_up_eviction
from lowtide.remat.evict.victims import make_room
from lowtide.schedule import Auto, Beam, Exact, ProgramOrder, Solver
from lowtide.schedule.exact.threshold import search
from lowtide.schedule.warm_up import warm_up, warm_up_beside_search

_CODE = (
    "import json, sys; asked = json.loads(sys.stdin.readline()); sys.path[:] = asked['path']; "
    "from lowtide.planning.warm_up import compile_beside; compile_beside(asked['limited'])"
)
_LIMIT_S = 300.0  # a busy machine may take long; what is missing then is compiled here
_LOGGER = logging.getLogger("lowtide")


def warm_up_planning(solver: Solver, *, limited: bool) -> None:
    """Have the kernels ready of an ordering by `solver`, and where it is `limited`, of the search for what is computed again.

    Where they have to be compiled, one line on the logger "lowtide" says so.
    """
    is_new = not is_at_hand(search)
    if is_new or (limited and not is_at_hand(make_room)):
        _LOGGER.warning("lowtide compiles its kernels for this machine and version, once: this takes some 20 seconds")
        if is_new and isinstance(solver, Auto) and can_be_cached() and _processors() > 1:
            with _beside(limited):
                warm_up(Exact(first=ProgramOrder(), max_cuts=0))
                warm_up(Beam())
    warm_up(solver)
    if limited:
        warm_up_eviction()
        warm_up_seeds()


def compile_beside(limited: bool) -> None:
    """What the other process compiles: all but the exact engine and beams, which take as long as all the rest."""
    warm_up_beside_search()
    if limited:
        warm_up_eviction()
        warm_up_seeds()


@contextlib.contextmanager
def _beside(limited: bool) -> Iterator[None]:
    """A second process compiles its part while this one compiles its own; both are done in the end, whatever became of the other."""
    silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        process = subprocess.Popen([sys.executable, "-c", _CODE], stdin=subprocess.PIPE, text=True, start_new_session=True, **silent)
    except (OSError, ValueError):  # this process does it all, then
        yield
        return
    try:
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.write(json.dumps({"path": sys.path, "limited": limited}) + "\n")
            process.stdin.close()
        yield
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LIMIT_S)
    finally:
        with contextlib.suppress(OSError):
            process.kill()
        process.wait()


def _processors() -> int:
    """How many this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
