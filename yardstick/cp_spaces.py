"""A bound on the benefit of placement in two spaces, by ortools' CP-SAT: addresses are left out, bytes alive in the fast space are not.

    python -m yardstick.cp_spaces [--seconds 30] [--workers 4]

Of two spaces, the slow one without a capacity, no placement has more benefit than the best choice of buffers whose bytes alive fit into
the fast one at every step.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

from ortools.sat.python import cp_model

from yardstick.cp_sat import Solver
from yardstick.engines import Finding
from yardstick.files import instance, instance_names
from yardstick.fill import record


def most_benefit(buffers: dict[str, Any], solver: Solver) -> Finding:
    """The bound. Raises ValueError where there are not two spaces, the second one without a capacity."""
    if len(buffers["spaces"]) != 2 or buffers["spaces"][1] is not None:
        raise ValueError(f"{buffers['name']}: expected two spaces, the second without a capacity, got {buffers['spaces']}")
    began = time.perf_counter()
    model, size, start, end = cp_model.CpModel(), buffers["size"], buffers["start"], buffers["end"]
    unit = math.gcd(buffers["spaces"][0], *size)
    ahead = [model.new_int_var(int(1 not in allowed), int(0 in allowed), "") for allowed in buffers["allowed"]]  # lies in the fast one
    for step in _peaks(start, end):
        alive = [buffer for buffer in range(len(size)) if start[buffer] <= step < end[buffer]]
        model.add(sum(size[buffer] // unit * ahead[buffer] for buffer in alive) <= buffers["spaces"][0] // unit)
    gains = zip(buffers["benefit"], buffers["allowed"], ahead, strict=True)
    model.maximize(sum(gain * each for gain, allowed, each in gains if len(allowed) > 1))
    solved, _ = solver.solve(model)
    bound = math.floor(solved.best_objective_bound + 0.5)
    return Finding(buffers["name"], "spaces", None, None, bound, f"CP-SAT, bytes alive, {solver}", time.perf_counter() - began)


def _peaks(start: list[int], end: list[int]) -> list[int]:
    """The steps at which all that is alive is seen: the last start before each end."""
    events = sorted([(step, 1) for step in start] + [(step, 0) for step in end])
    return sorted({step for (step, begins), (_, goes_on) in zip(events, [*events[1:], (0, 0)], strict=True) if begins and not goes_on})


def main() -> None:
    """Takes the bound of each instance into the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=Solver.workers)
    options = parser.parse_args()
    for name in instance_names():
        buffers = instance(name)
        if "spaces" in buffers:
            found = most_benefit(buffers, Solver(options.seconds, options.workers))
            record(buffers, [found], by="CP-SAT")
            print(name, found.bound, f"{found.seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
