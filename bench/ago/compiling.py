"""What generated kernels take to be made: in a process with an empty cache, and in the next one, which finds all of it there.

    python -m bench.ago.compiling
    python -m bench.ago.compiling --cases mobilevit squeezenet

"seconds" is what passes while regions are found, compiled, measured and loaded; "processor_s" is what this process and its compilers
compute meanwhile. "optimize_s" is all of `lowtide.optimize`, capture and plan included. Our own kernels, which numba compiles, are there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from bench.ago.networks import case, other_cases, paper_cases
from bench.results import Cell, Results, with_kept

COLUMNS = ("case", "cache", "seconds", "processor_s", "optimize_s", "failed")
_CODE = "import sys; from bench.ago.compiling import taken; taken(sys.argv[1])"
_PATIENCE_S = 300


def taken(name: str) -> None:
    """Print what one network takes in this process, as JSON."""
    import torch

    import lowtide
    from lowtide.planning import machine

    torch.set_num_threads(1)
    model, args = case(name).built()
    within, computed, made = [0.0], [0.0], machine.networked

    def watched(*given: object) -> object:
        start, before = time.perf_counter(), sum(os.times()[:4])
        try:
            return made(*given)  # type: ignore[arg-type]
        finally:
            within[0] += time.perf_counter() - start
            computed[0] += sum(os.times()[:4]) - before

    machine.networked = watched  # type: ignore[assignment]
    lowtide.optimize(torch.nn.Linear(2, 2).eval(), (torch.zeros(1, 2),), exact=False)  # what a process loads once
    within[0] = computed[0] = 0.0
    start = time.perf_counter()
    lowtide.optimize(model, args, exact=False)
    print(json.dumps({"seconds": within[0], "processor_s": computed[0], "optimize_s": time.perf_counter() - start}))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ago.compiling", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", nargs="*", default=[], help="names, or how they begin; without, all that bench.ago has")
    options = parser.parse_args()
    names = [each.name for each in (*paper_cases(), *other_cases())]
    for name in names:
        if not options.cases or name.startswith(tuple(options.cases)):
            save(_rows(name)).print()


def save(rows: Sequence[dict[str, Cell]]) -> Results:
    """Put rows into the table; it is saved after each network."""
    notes = tuple((__doc__ or "").strip().split("\n\n")[-1].split("\n"))
    kept = with_kept("ago_compiling", rows, ("case", "cache"))
    Results("ago_compiling", "What generated kernels take to be made", COLUMNS, tuple(kept), notes).save()
    return Results("ago_compiling", "What generated kernels take to be made", COLUMNS, tuple(rows))


def _rows(name: str) -> list[dict[str, Cell]]:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "LOWTIDE_CACHE": folder}
        return [{"case": name, "cache": cache, **_asked(name, environment)} for cache in ("empty", "filled")]


def _asked(name: str, environment: dict[str, str]) -> dict[str, Cell]:
    command = [sys.executable, "-W", "ignore", "-c", _CODE, name]
    try:
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S, check=True)
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {_PATIENCE_S} s"}
    except subprocess.CalledProcessError as error:
        return {"failed": (error.stderr.strip().splitlines() or ["?"])[-1][:200]}
    found: dict[str, Cell] = json.loads(answer.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
