"""The placement engine: known instances by all placers, beside minimalloc, and the buffers of every model's training step.

    python -m bench.place [--only instances|models] [--data FOLDER ...] [--instances NAME ...] [--solvers TEXT ...] [--cap SECONDS]
                          [--models NAME ...] [--batch-sizes 1 32] [--keep] [--made FOLDER]

Instances are files NAME.csv, or NAME.CAPACITY.csv where CAPACITY bytes are known to suffice; those are asked two questions: for the
smallest arena, and for any placement within the capacity. Each row is a process of its own, in which kernels are loaded before the clock
starts. Training steps are captured on the meta device, with plain SGD, and ordered by lowtide; their buffers are placed at multiples of
1 byte, and of 64 as PyTorch's allocator for the CPU does. `--made` writes two instances of a million buffers into a folder of `--data`.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import lowtide
from lowtide.placement.base import Placement, Placer, limited, warm_up
from lowtide.problems.files import load_buffers
from lowtide.problems.placement import PlaceProblem
from research.solvers import parse_placer

if TYPE_CHECKING:
    from bench.results import Cell  # imports torch, which a row's process would take seconds and memory for

_OWN = Path(__file__).parents[1] / "tests" / "data" / "place"
_CAPACITY = re.compile(r"\.(\d+)$")  # of a name without its suffix
_SHARED = Path(__file__).parents[2] / "shared" / "data" / "place"

# CPU-seconds of google/minimalloc to fit each instance into 1,048,576 bytes, as measured on two shared x86 cores for the README that
# comes with the instances; "C" within its lower bound of 1,039,360 took it 0.06 s, "D" and "J" within theirs were open after 25 s.
MINIMALLOC_S = {
    "A": 6.02, "B": 4.92, "C": 0.83, "D": 3.99, "E": 3.97, "F": 5.68, "G": 1.21, "H": 1.70, "I": 3.63, "J": 1.46, "K": 0.64,
}  # fmt: skip

SOLVERS = (
    "auto", "exact", "portfolio", "greedy{order=size}", "greedy{order=area}", "greedy{order=lifetime}", "greedy{order=start}",
    "greedy{order=conflicts}", "rectangles{max_effort=1e9}", "addresses{solver=highs}", "addresses{solver=scip}",
)  # fmt: skip

COLUMNS = (
    "instance", "buffers", "question", "solver", "cpu_s", "minimalloc_cpu_s", "seconds", "arena", "lower_bound", "above_percent", "status",
    "effort", "process_bytes",
)  # fmt: skip
NOTES = (
    "cpu_s, seconds: of the search, once its kernels are loaded; minimalloc_cpu_s: of minimalloc for the same question, on another run",
    "arena, lower_bound: in bytes; above_percent: of the arena over the bound that is proven; process_bytes: most resident, all included",
    "effort: the solver's own counts",
)
MODEL_COLUMNS = (
    "model", "batch_size", "alignment", "operators", "buffers", "arena_bytes", "lower_bound_bytes", "above", "status", "solver", "cpu_s",
    "seconds",
)  # fmt: skip
MODEL_NOTES = (
    "buffers of the order that lowtide plans: tensors that the step makes, those that take over each other's memory as one",
    "alignment, above: in bytes; above: of the arena over the bound that is proven, 0 is no fragmentation",
)


class Question(NamedTuple):
    """A file, and what is asked of it."""

    path: Path
    capacity_bytes: int | None

    @property
    def name(self) -> str:
        """The instance, without its capacity."""
        return _CAPACITY.sub("", self.path.stem)

    def __str__(self) -> str:
        return "smallest" if self.capacity_bytes is None else f"fits in {self.capacity_bytes:,}"


def main() -> None:
    options = parser().parse_args()
    if options.made:
        make(options.made, 1_000_000)
    if options.row:
        print(json.dumps(row(Question(Path(options.row[0]), int(options.row[2]) if options.row[2] else None), options.row[1], options.cap)))
    elif options.model_row:
        print(json.dumps(model_rows(options.model_row[0], int(options.model_row[1]))))
    else:
        for section in options.only:
            {"instances": instances, "models": models}[section](options)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["instances", "models"], choices=["instances", "models"])
    parser.add_argument("--data", nargs="+", type=Path, default=[_SHARED, _OWN], metavar="FOLDER", help="where instances are")
    parser.add_argument("--instances", nargs="+", metavar="NAME", help="those alone")
    parser.add_argument("--solvers", nargs="+", default=list(SOLVERS), metavar="TEXT", help="as `lowtide place --solver` takes them")
    parser.add_argument("--cap", type=float, default=60.0, metavar="SECONDS", help="of each solver on each instance")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="all by default")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--keep", action="store_true", help="keep the rows of the saved tables that are not measured now")
    parser.add_argument("--made", type=Path, metavar="FOLDER", help="write the made-up instances there first")
    parser.add_argument("--row", nargs=3, metavar=("FILE", "SOLVER", "CAPACITY"), help="print one row as JSON: for the process of its own")
    parser.add_argument("--model-row", nargs=2, metavar=("MODEL", "BATCH_SIZE"), help="the same of one model")
    return parser


def make(folder: Path, count: int) -> None:
    """Two instances of so many buffers: lives of all lengths at random; and those of a training step of one layer after the other.

    A layer saves one tensor for its backward pass, has one of its own in the forward pass and one in the backward pass, and a small one.
    """
    draw, layers = np.random.default_rng(0), count // 4
    start = draw.integers(0, count, count)
    end = np.minimum(start + 1 + (20 * draw.pareto(1.1, count)).astype(np.int64), count + 1)
    _write(folder / f"made_random_{count}.csv", start, end, 16 * draw.integers(1, 65_536, count))
    forward, backward, small = 2 * np.arange(layers), 4 * layers - 2 * np.arange(layers) - 1, draw.integers(0, 4 * layers, layers)
    start = np.concatenate([forward, forward + 1, backward, small])
    end = np.concatenate([backward + 1, forward + 3, backward + 3, small + 1 + draw.integers(0, 50, layers)])
    _write(folder / f"made_step_{count}.csv", start, end, 512 * draw.integers(1, np.repeat([4096, 64], [3 * layers, layers])))


def _write(path: Path, start: NDArray[np.int64], end: NDArray[np.int64], size: NDArray[np.int64]) -> None:
    rows = (f"{number},{low},{high},{nbytes}" for number, (low, high, nbytes) in enumerate(zip(start, end, size, strict=True)))
    path.write_text("\n".join(["id,lower,upper,size", *rows]) + "\n", encoding="utf-8")


def instances(options: argparse.Namespace) -> None:
    """All placers on all instances, saved after each row."""
    from bench.results import Results

    keys = ("instance", "question", "solver")
    rows = _kept("place", keys) if options.keep else {}
    for question in questions(options.data, options.instances):
        for solver in options.solvers:
            line = _in_a_process(["--row", str(question.path), solver, str(question.capacity_bytes or "")], options.cap)
            if not isinstance(line, dict):
                line = {"status": line}
            rows[question.name, str(question), solver] = {
                "instance": question.name, "question": str(question), "solver": solver, **line
            }  # fmt: skip
            print({key: line.get(key) for key in ("status", "cpu_s", "above_percent")}, question.name, question, solver, flush=True)
            results = Results("place", "Placement of known instances", COLUMNS, tuple(rows.values()), NOTES)
            results.save()
    results.print()


def questions(folders: Iterable[Path], names: Sequence[str] | None) -> Iterator[Question]:
    """Each instance once, small ones first; those of a known capacity twice."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.csv")):
            found.setdefault(Question(path, None).name, path)
    for name, path in sorted(found.items(), key=lambda item: (item[1].stat().st_size, item[0])):
        if names is None or name in names:
            yield Question(path, None)
            if capacity := _CAPACITY.search(path.stem):
                yield Question(path, int(capacity[1]))


def row(question: Question, solver: str, cap_s: float) -> dict[str, Cell]:
    """One line, measured in this process."""
    problem, placer = load_buffers(question.path), _capped(parse_placer(solver), cap_s)
    found, cpu_s, seconds = measured(problem, placer, question.capacity_bytes)
    line: dict[str, Cell] = {
        "buffers": problem.buffer_count,
        "cpu_s": round(cpu_s, 3),
        "minimalloc_cpu_s": MINIMALLOC_S.get(question.name) if question.capacity_bytes == 2**20 else None,
        "seconds": round(seconds, 3),
        "lower_bound": found.lower_bound_bytes,
        "status": found.status.name.lower(),
        "effort": ", ".join(f"{name} {count:,}" for name, count in found.stats.items()),
        "process_bytes": _most_resident_bytes(),
    }
    if found.offsets:
        line |= {"arena": found.arena_bytes, "above_percent": 100 * (found.arena_bytes / max(found.lower_bound_bytes, 1) - 1)}
    return line


def _most_resident_bytes() -> int:
    """Of this process, by the system's own count; the usual one starts with what the parent had."""
    status = Path("/proc/self/status")
    told = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    return 1024 * (int(told[1]) if told else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def measured(problem: PlaceProblem, placer: Placer, capacity_bytes: int | None = None) -> tuple[Placement, float, float]:
    """An answer, with its CPU-seconds and its seconds."""
    warm_up(placer)
    cpu_s, seconds = time.process_time(), time.perf_counter()
    found = placer.place(problem, capacity_bytes)
    return found, time.process_time() - cpu_s, time.perf_counter() - seconds


def models(options: argparse.Namespace) -> None:
    """The buffers of training steps, saved after each model."""
    from bench.models import MODELS
    from bench.results import Results

    keys = ("model", "batch_size", "alignment")
    rows = _kept("place_models", keys) if options.keep else {}
    for batch_size in options.batch_sizes:
        for name in options.models or MODELS:
            lines = _in_a_process(["--model-row", name, str(batch_size)], 600)
            if not isinstance(lines, list):
                lines = [{"alignment": None, "status": lines}]
            for line in lines:
                rows[name, batch_size, line["alignment"]] = {"model": name, "batch_size": batch_size, **line}
                print(name, batch_size, {key: line.get(key) for key in ("alignment", "above", "status", "cpu_s")}, flush=True)
            results = Results("place_models", "Placement of training steps", MODEL_COLUMNS, tuple(rows.values()), MODEL_NOTES)
            results.save()
    results.print()


def model_rows(name: str, batch_size: int) -> list[dict[str, Cell]]:
    """One training step, at both alignments."""
    from bench.models import MODELS
    from bench.models.workload import plain_sgd
    from lowtide import optimize
    from lowtide.cost.memory import order_problem
    from lowtide.placement import AUTO
    from research.buffers import place_problem

    made = MODELS[name].build(batch_size, "meta")
    plan = optimize(made.model, made.batch, loss=made.loss, optimizer=plain_sgd(made.model), planning=lowtide.Planning(progress=False)).plan
    lines: list[dict[str, Cell]] = []
    for align_bytes in (1, 64):
        problem = place_problem(order_problem(plan.graph), plan.order, align_bytes=align_bytes)
        found, cpu_s, seconds = measured(problem, AUTO)
        lines.append({
            "alignment": align_bytes,
            "operators": len(plan.order),
            "buffers": problem.buffer_count,
            "arena_bytes": found.arena_bytes,
            "lower_bound_bytes": found.lower_bound_bytes,
            "above": found.arena_bytes - found.lower_bound_bytes,
            "status": found.status.name.lower(),
            "solver": found.solver,
            "cpu_s": round(cpu_s, 3),
            "seconds": round(seconds, 3),
        })  # fmt: skip
    return lines


def _capped(placer: Placer, cap_s: float) -> Placer:
    """The placer with that many seconds at most, where it can be told."""
    return limited(placer, max_seconds=cap_s) if hasattr(placer, "max_seconds") else placer


def _in_a_process(arguments: Sequence[str], cap_s: float) -> Any:
    """What the row's process prints, or what became of it. Beyond the cap it has as long again, and a minute to load what it needs."""
    command = [sys.executable, "-m", "bench.place", *arguments, "--cap", str(cap_s)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * cap_s + 60)
    except subprocess.TimeoutExpired:
        return f"stopped after {2 * cap_s + 60:.0f} s"
    if done.returncode:
        return f"failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}"
    return json.loads(done.stdout.strip().splitlines()[-1])


def _kept(name: str, keys: Sequence[str]) -> dict[tuple[Any, ...], Mapping[str, Cell]]:
    """The rows of a saved table by what tells them apart."""
    from bench.results import load

    try:
        return {tuple(line[key] for key in keys): line for line in load(name).rows}
    except FileNotFoundError:
        return {}


if __name__ == "__main__":
    main()
