"""Who follows what the program of this thread reads, while it is captured."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lowtide.capture.care.follower import Follower
from lowtide.capture.care.instances import let_go, listeners
from lowtide.capture.care.turns import undoing
from lowtide.capture.effects.containers import LeavingError


def put_beside() -> list[tuple[Any, str, Any]]:
    """The numbers and texts that the program which this thread follows has put into attributes so far."""
    follower = listeners.get(threading.get_ident())
    return follower.puts() if isinstance(follower, Follower) else []


@contextmanager
def following(
    models: Sequence[nn.Module], functions: Iterable[Any] = (), optimizer: torch.optim.Optimizer | None = None
) -> Iterator[Follower]:
    """Follow what a program reads that runs inside, in this thread; `models` are looked at elsewhere."""
    thread = threading.get_ident()
    before, follower = listeners.get(thread), Follower(models, functions, optimizer)

    def end() -> None:
        follower.turn_back()
        if before is None:
            listeners.pop(thread, None)
        else:
            listeners[thread] = before
        while follower.classes:
            let_go(follower.classes.pop())

    with undoing() as undo:
        undo(end)
        listeners[thread] = follower
        try:
            yield follower
        except LeavingError:
            follower.refuse_moved()  # another attempt would move it once more
            raise
