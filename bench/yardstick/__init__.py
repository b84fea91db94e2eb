"""The exact ordering search in C++ that the engine is timed against. It knows less: one output a node, no workspaces, no control edges."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bench.order_files import problem_to_json
from lowtide.problems.order import OrderProblem

_SOURCE = Path(__file__).with_name("exact_order.cpp")
_SAID = re.compile(
    r" LB=(?P<bound>[\d.]+) UB=(?P<peak>[\d.]+) KB (?P<proof>OPT|open) .* nodes=(?P<states>\d+) .* total=(?P<seconds>[\d.]+)$"
)


@dataclass(frozen=True)
class Found:
    """What the yardstick said of one problem. Sizes are rounded to a tenth of a KiB, seconds to a thousandth."""

    peak_kib: float
    bound_kib: float
    is_optimal: bool
    states: int
    seconds: float


@dataclass(frozen=True)
class Yardstick:
    """The compiled program, in a folder that the caller owns."""

    program: Path

    @classmethod
    def build(cls, folder: Path) -> Yardstick | None:
        """Compiles it into `folder`; None where there is no g++."""
        compiler = shutil.which("g++")
        if compiler is None:
            return None
        program = folder / "exact_order"
        subprocess.run([compiler, "-O2", "-std=c++17", str(_SOURCE), "-o", str(program)], check=True)
        return cls(program)

    def solve(self, problem: OrderProblem, max_seconds: float = 30.0) -> Found:
        """The optimum of a problem, or what is known of it after so many seconds. Raises ValueError for a problem that it cannot read."""
        file = self.program.with_name("problem.txt")
        file.write_text(text_of(problem), encoding="utf-8")
        done = subprocess.run([str(self.program), str(file), str(max_seconds)], capture_output=True, text=True, check=True)
        said = _SAID.search(done.stdout.strip())
        if said is None:
            raise ValueError(f"yardstick: expected a line with LB, UB, nodes and total; got {done.stdout.strip()!r}")
        return Found(float(said["peak"]), float(said["bound"]), said["proof"] == "OPT", int(said["states"]), float(said["seconds"]))


def text_of(problem: OrderProblem) -> str:
    """A problem as the yardstick reads it: a line of counts, then a line a tensor with its operator.

    Raises ValueError where a node makes not just one tensor, has a workspace or waits for more than tensors.
    """
    data = json.loads(problem_to_json(problem))
    if "tensors" in data:
        raise ValueError(
            "yardstick: expected a problem that fits the simple JSON form, one tensor a node and nothing else; got a general one"
        )
    items = data["nodes"]
    lines = [
        " ".join(map(str, (int(item["op"] == "Input"), item["bytes"], int(item["inplace"]), len(item["inputs"]), *item["inputs"])))
        for item in items
    ]
    return "\n".join([f"{len(items)} 1", *lines, ""])
