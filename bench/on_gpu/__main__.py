"""All that is to be measured on a GPU, in the order of worth, each part in a process of its own, with a time limit.

    python -m bench.on_gpu [--minutes 15] [--only PART ...] [--again]

Kernels are compiled once, and parts planned side by side; what is timed runs alone. Rows are saved as they come, and a part that has ended
on this device is not run again: one that was cut off or died is. Without a GPU it is a dry run: every part does on the CPU what it
would do on a GPU, on small stand-ins, and nothing is saved. The exit code is 1 where something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import IO

from bench.on_gpu.ground import PLACES, Ground, Row, send
from bench.on_gpu.parts import KERNELS, PARTS, Part
from bench.sweep import Sweep

COLUMNS = (
    "part", "setting", "device", "verdict", "promised_bytes", "measured_bytes", "reserved_bytes", "eager_bytes", "promised_ms",
    "step_ms", "promised_ratio", "measured_ratio", "peak_share", "recomputed", "operators", "seconds", "why",
)  # fmt: skip
_GIB = 64  # of the device that processes side by side may hold, beside the one that runs
_AT_ONCE = max(1, min(8, (os.cpu_count() or 1) // 2))  # parts: each plans and compiles by more than one process
_PATIENCE = 5  # times as long on a CPU, whose cores others may use
_CUT_OFF = ("dead", "time-out")
_BAD = ("failed", "different", "raised", "off", "out of memory", "evaluation does not fit", *_CUT_OFF)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0, help="of wall clock, for all that is run")
    parser.add_argument("--only", nargs="+", default=[""], metavar="PART", help="parts whose name has one of these in it")
    parser.add_argument("--again", action="store_true", help="also parts that have rows of this device")
    options = parser.parse_args()
    ground = Ground.here()
    chosen = [part for part in PARTS if part.name == KERNELS or any(text in part.name for text in options.only)]
    done = set() if options.again or ground.dry else ended([row for row in SWEEP.saved() if row["device"] == ground.name])
    pending = [part for part in chosen if part.name not in done - {KERNELS}]
    shutil.rmtree(PLACES, ignore_errors=True)
    PLACES.mkdir()
    rows = run(pending, time.monotonic() + 60 * options.minutes, _PATIENCE if ground.dry else 1, at_once=1 if ground.dry else _AT_ONCE)
    table = SWEEP.run(rows, save=not ground.dry)
    table.print()
    sys.exit(any(row["verdict"] in _BAD for row in table.rows))


def ended(rows: Sequence[Row]) -> set[str]:
    """The parts that have told all that they had to."""
    return {row["part"] for row in rows} - {row["part"] for row in rows if row["verdict"] in _CUT_OFF}


def run(parts: Sequence[Part], deadline: float, patience: int = 1, *, at_once: int = 1) -> Iterator[Row]:
    """The rows of these parts as they come, as far as the time goes: several parts run side by side, what is timed in each alone."""
    waiting, running, found = list(parts), dict[str, int](), queue.Queue[Row | str]()
    while waiting or running:
        for part in [each for each in waiting if _may_begin(each, waiting, running)][: at_once - len(running)]:
            if time.monotonic() >= deadline or sum(running.values()) + part.gib > _GIB:
                break
            waiting.remove(part)
            running[part.name] = part.gib
            threading.Thread(target=_attempted, args=(part, patience, deadline, found), daemon=True).start()
        if not running:
            print(f"out of time before {', '.join(part.name for part in waiting)}: run again to go on", file=sys.stderr)
            return
        got = found.get()
        if isinstance(got, str):
            del running[got]
        else:
            yield got


def _may_begin(part: Part, waiting: Sequence[Part], running: Collection[str]) -> bool:
    """Kernels are compiled by one part, others beside it do not plan."""
    return not part.plans or not (KERNELS in running or any(each.name == KERNELS for each in waiting))


def _attempted(part: Part, patience: int, deadline: float, found: queue.Queue[Row | str]) -> None:
    """Each row, then the part's name."""
    try:
        for row in attempt(part, min(patience * part.seconds, deadline - time.monotonic())):
            found.put(row)
    finally:
        found.put(part.name)


def attempt(part: Part, seconds: float) -> Iterator[Row]:
    """One part in a process of its own: what it tells as it comes, and how it ended where that was not well."""
    clock = time.monotonic()
    pipe = subprocess.PIPE
    process = subprocess.Popen(_command(part.name), stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    said: list[str] = []
    heard = queue.Queue[str | None]()
    pipes = ((process.stdout, heard.put), (process.stderr, said.append))
    readers = [threading.Thread(target=_read, args=each, daemon=True) for each in pipes]
    for thread in (*readers, threading.Thread(target=_wait, args=(process, readers, heard), daemon=True)):
        thread.start()
    late = threading.Timer(seconds, send, (process.pid, signal.SIGKILL))
    late.start()
    known: Row = {"part": part.name, "device": Ground.here().name}
    for line in iter(heard.get, None):
        if row := _row(line):
            yield known | {"seconds": round(time.monotonic() - clock, 1)} | row
    code = process.wait()
    in_time = late.is_alive() or code != -signal.SIGKILL
    late.cancel()
    (PLACES / str(process.pid)).unlink(missing_ok=True)
    if code:  # others may stand still for it
        for place in PLACES.glob("*"):
            send(int(place.name), signal.SIGCONT)
    if not in_time:
        yield known | {"seconds": round(time.monotonic() - clock, 1), "verdict": "time-out", "why": f"ended after {seconds:.0f} s"}
    elif code:
        yield known | {"seconds": round(time.monotonic() - clock, 1), "verdict": "dead", "why": f"exit code {code}: {_last(''.join(said))}"}


def _read(pipe: IO[str], take: Callable[[str], None]) -> None:
    with pipe:
        for line in pipe:
            take(line)


def _wait(process: subprocess.Popen[str], readers: Iterable[threading.Thread], heard: queue.Queue[str | None]) -> None:
    """Until the part has ended and all it said is heard; a process that it left behind may hold its output for ever."""
    process.wait()
    for reader in readers:
        reader.join(1)
    heard.put(None)


def _command(name: str) -> list[str]:
    return [sys.executable, "-m", "bench.on_gpu.one", name]


def _row(line: str) -> Row:
    """What a line tells; nothing where it is another's word, or cut off."""
    try:
        told = json.loads(line)
    except ValueError:
        return {}
    return told if isinstance(told, dict) and "verdict" in told else {}


def _last(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:300]


def summary(rows: list[Row]) -> tuple[str, ...]:
    """What the rows come to."""
    return tuple(f"{count} {verdict}" for verdict, count in Counter(row["verdict"] for row in rows).most_common())


SWEEP = Sweep("on_gpu", "On a GPU: promised and measured", COLUMNS, [part.name for part in PARTS], summary)

if __name__ == "__main__":
    main()
