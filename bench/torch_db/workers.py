"""Runs many small trials in worker processes, a few at a time: one that dies or hangs is counted and takes nobody with it.

A worker prints a row as one line of JSON as soon as it is known, and a line after the last row of a name. What a worker that ended early
had not yet answered is tried again from the name after the one that it died in.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

Row = dict[str, Any]


def answers(command: Sequence[str], names: Sequence[str], batch: int, limit_seconds: float, dead: Row) -> Iterator[Row]:
    """The rows of each name, of workers `python -m COMMAND --worker NAME ...`; one more, made of `dead`, where a worker ended or hung."""
    left = list(names)
    while left:
        group = left[:batch]
        done: set[str] = set()
        for row in _worker([*command, "--worker", *group], limit_seconds):
            if "done" in row:
                done.add(row["done"])
            else:
                yield row
        rest = [name for name in group if name not in done]
        if rest:
            yield {"name": rest[0], **dead, "why": f"the process ended, or gave no answer in {limit_seconds:.0f} s"}
        left = rest[1:] + left[batch:]


def _worker(command: Sequence[str], limit_seconds: float) -> Iterator[Row]:
    """What one worker says until it ends, or is silent for too long."""
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
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


def told(row: Row) -> None:
    """Print a row for the process that started this one; {"done": NAME} after the last row of a name."""
    print("\n" + json.dumps(row), flush=True)
