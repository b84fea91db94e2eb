"""Kernels made ready before a search: loaded from disk, or compiled by two processes at once where that was never done here.

numba compiles in Python, so that threads would not help: a second process compiles half of what is needed, and this one finds that on disk.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import subprocess
import sys
import threading
from typing import Any

from lowtide.base.kernels import can_be_cached, is_at_hand
from lowtide.base.process import processors
from lowtide.remat.eviction import go_through, warm_up_eviction
from lowtide.remat.local_moves import warm_up_local_moves
from lowtide.remat.seeds import warm_up_seeds
from lowtide.schedule import Auto, Beam, Exact, ProgramOrder, Solver
from lowtide.schedule.auto import warm_up, warm_up_beside_search
from lowtide.schedule.threshold import search

_CODE = (
    "import json, sys; asked = json.loads(sys.stdin.readline()); sys.path[:] = asked['path']; "
    "from lowtide.planning.warm_up import compile_beside; compile_beside(asked['limited'])"
)
_LIMIT_S = 300.0  # a busy machine may take long; what is missing then is compiled here
_LOGGER = logging.getLogger("lowtide")
_BEGINS = "lowtide compiles its kernels for this machine and version, once: some 20 seconds on two idle processors, minutes on busy ones"
_ENDS = "lowtide has compiled its kernels"


def compile_ahead(solver: Solver, *, limited: bool) -> None:
    """Have a second process begin with its half, where kernels have to be compiled: whatever else comes before a search runs beside it."""
    if _BESIDE.is_running:  # for an earlier call, which was refused before it got here
        return
    if not is_at_hand(search) and isinstance(solver, Auto) and can_be_cached() and processors() > 1:
        _LOGGER.warning(_BEGINS)
        _BESIDE.start(limited)


def warm_up_planning(solver: Solver, *, limited: bool) -> None:
    """Have the kernels ready of an ordering by `solver`, and where it is `limited`, of the search for what is computed again.

    Where they have to be compiled, the logger "lowtide" says so, and says when that is over.
    """
    compile_ahead(solver, limited=limited)
    if compiles := _BESIDE.is_running:
        try:
            warm_up(Exact(first=ProgramOrder(), max_cuts=0))
            _BESIDE.wait()
        finally:
            _BESIDE.end()
    elif limited and not is_at_hand(go_through):
        compiles = True
        _LOGGER.warning(_BEGINS)
    warm_up(solver)
    _warm_up_searches(limited)
    if compiles:
        _LOGGER.warning(_ENDS)


def load_ahead(solver: Solver, *, limited: bool) -> None:
    """The same where nothing has to be compiled, while something else is waited for."""
    if is_at_hand(search) and is_at_hand(go_through) and not _BESIDE.is_running:
        warm_up_planning(solver, limited=limited)


def compile_beside(limited: bool) -> None:
    """What the other process compiles: all but the exact engine, which takes as long as all the rest."""
    warm_up(Beam())
    warm_up_beside_search()
    _warm_up_searches(limited)


def _warm_up_searches(limited: bool) -> None:
    if limited:
        warm_up_eviction()
        warm_up_local_moves()
        warm_up_seeds()


class _Beside:
    """The second process, which ends with this one at the latest."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()  # two threads may be the first

    @property
    def is_running(self) -> bool:
        """Whether it was started, and nobody has waited for it yet."""
        return self._process is not None

    def start(self, limited: bool) -> None:
        """Let it begin; where no process can be had, this one does it all."""
        silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._process is not None:
                return
            process = subprocess.Popen([sys.executable, "-c", _CODE], stdin=subprocess.PIPE, text=True, start_new_session=True, **silent)
            self._process = process
            assert process.stdin is not None
            process.stdin.write(json.dumps({"path": sys.path, "limited": limited}) + "\n")
            process.stdin.close()

    def wait(self) -> None:
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LIMIT_S)

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):
                process.kill()
            process.wait()


_BESIDE = _Beside()
atexit.register(_BESIDE.end)
