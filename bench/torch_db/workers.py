"""Runs many small trials in worker processes, a few at a time: one that dies or hangs is counted and takes nobody with it.

A worker is `python -m MODULE --worker NAME ...`; it prints one line of JSON as soon as a trial is done. What a worker that ended early
had not yet answered is tried again from the trial after the one that it died in.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Row = dict[str, Any]


def answers(
    module: str,
    names: Sequence[str],
    batch: int,
    limit_seconds: float,
    dead: Callable[[str, str], Row],
    settings: Sequence[str] = (),
) -> Iterator[Row]:
    """One or more rows for each name; `dead(name, why)` makes that of a trial whose worker ended or hung. Workers get `settings` first."""
    left = list(names)
    while left:
        group = left[:batch]
        done: set[str] = set()
        for row in _worker(module, [*settings, *group], limit_seconds):
            if row.pop("last"):
                done.add(row["name"])
            yield row
        rest = [name for name in group if name not in done]
        if rest:
            yield dead(rest[0], f"the process ended, or gave no answer in {limit_seconds:.0f} s")
        left = rest[1:] + left[batch:]


def _worker(module: str, names: Sequence[str], limit_seconds: float) -> Iterator[Row]:
    """The rows of one worker until it ends, or is silent for too long."""
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", module, "--worker", *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        try:
            for line in _lines(process.stdout, limit_seconds):
                if line.startswith(b"{"):
                    yield json.loads(line)
        finally:
            process.kill()


def _lines(stream: Any, limit_seconds: float) -> Iterator[bytes]:
    """Lines as they come; ends with the stream, or after a silence of `limit_seconds`."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        heard = time.monotonic()
        while time.monotonic() - heard < limit_seconds:
            if not selector.select(timeout=1):
                continue
            chunk = os.read(stream.fileno(), 65536)
            if not chunk:
                return
            heard = time.monotonic()
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines


def told(row: Row, last: bool) -> None:
    """Print a row for the process that started this one."""
    print("\n" + json.dumps(row | {"last": last}), flush=True)
