"""All saved tables anew, on one machine and at one commit: `make results`, overnight.

    python -m bench.rerun                    # what is not of this commit and machine yet; then docs/results.md
    python -m bench.rerun --list             # what that is, with how old each table is
    python -m bench.rerun --only ago serve   # tables whose name begins so

Each bench is a process that saves into a folder of its own, `build/results/COMMIT/..`; what it printed lies there, too. When it has ended
well, its tables take the place of the old ones: none is ever half old. One that fails, or takes longer than it may, leaves the old ones,
and is told at the end. What was cut off goes on with the next call: tables that are there are left out, and a bench that keeps its rows
finds those. Nothing is begun while files of the package differ from the commit, as a table could not say of which code it is.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine import code, machine
from bench.results import FOLDER_VARIABLE, RESULTS

_ROOT = Path(__file__).parents[1]
_STAGED = _ROOT / "build" / "results"


@dataclass(frozen=True)
class Bench:
    """A command, and the tables that it saves."""

    command: str  # after `python -m`
    tables: tuple[str, ...]
    most_minutes: float = 120

    @property
    def module(self) -> str:
        return self.command.split()[0]


BENCHES = (
    Bench("bench.order_only", ("order_only",)),
    Bench("bench.order_real", ("order_real",)),
    Bench("bench.order_speed", ("order_speed",)),
    Bench("bench.order_waits", ("order_waits",)),
    Bench("bench.incremental", ("incremental",)),
    Bench("bench.large", ("large",)),
    Bench("bench.equal", ("equal",)),
    Bench("bench.equal --latency 1.5 --arena", ("equal_limited",)),
    Bench("bench.random_networks", ("random_networks",)),
    Bench("bench.random_networks --limits", ("random_networks_limited",)),
    Bench("bench.any_effects", ("any_effects",)),
    Bench("bench.noticing", ("noticing",)),
    Bench("bench.budget", ("budget",), 300),
    Bench("bench.budget --peers eager inductor --table budget_inductor", ("budget_inductor",), 300),
    Bench("bench.budget --peers eager checkpoint --budgets 2 --no-arena --table budget_parts", ("budget_parts",), 180),
    Bench("bench.magis", ("magis", "magis_effort"), 300),
    Bench("bench.magis_figures", ("magis_micro",)),
    Bench("bench.magis_outer", ("magis_outer",), 300),
    Bench("bench.magis_scale", ("magis_scale",)),
    Bench("bench.in_parts", ("in_parts",), 180),
    Bench("bench.halos", ("halos",)),
    Bench("bench.algebra", ("algebra",)),
    Bench("bench.dimensions", ("dimensions",)),
    Bench("bench.arena", ("arena",)),
    Bench("bench.arena_default", ("arena_default",)),
    Bench("bench.step_time", ("step_time",)),
    Bench("bench.planning_time", ("planning_time",)),
    Bench("bench.stability", ("stability",)),
    Bench("bench.report", ("report",)),
    Bench("bench.place", ("place", "place_models"), 600),
    Bench("bench.place_ablation ../shared/data/place", ("place_ablation",)),
    Bench("bench.iccad", ("iccad",)),
    Bench("bench.model_paper --plots", ("model_paper",), 300),
    Bench("bench.model_paper_joint", ("model_paper_joint",)),
    Bench("bench.dynamic --seconds 3600", ("dynamic",), 180),
    Bench("bench.dynamic.planned", ("dynamic_planned",)),
    Bench("bench.dynamic.equal", ("dynamic_equal",)),
    Bench("bench.dynamic.near", ("dynamic_near",)),
    Bench("bench.dynamic.overhead", ("dynamic_overhead",)),
    Bench("bench.dynamic.foreign --missing", ("dynamic_foreign",), 300),
    Bench("bench.frameworks", ("frameworks",)),
    Bench("bench.half_hour", ("half_hour",)),
    Bench("bench.few_bits", ("few_bits",)),
    Bench("bench.ranks", ("ranks",)),
    Bench("bench.ranks_simulated", ("ranks_simulated",)),
    Bench("bench.coverage --missing", ("coverage",), 600),
    Bench("bench.op_db --missing", ("op_db",), 600),
    Bench("bench.op_db --missing --samples 2", ("op_db_first_2",), 300),
    Bench("bench.op_db --missing --dtype autocast --samples 2", ("op_db_autocast_first_2",), 300),
    Bench("bench.module_db --missing", ("module_db",), 300),
    Bench("bench.module_db --missing --dtype autocast --samples 3", ("module_db_autocast_first_3",), 300),
    Bench("bench.optimizers_db", ("optimizers_db",)),
    Bench(
        'bench.ago --resume --contenders lowtide "lowtide frozen" "lowtide NI" "lowtide NR" onnxruntime openvino inductor eager',
        ("ago",),
        300,
    ),
    Bench(
        "bench.ago --resume --cases efficientnet ghostnet mobilenetv3 edgenext repvgg regnety resnet18 convnext --save ago_others",
        ("ago_others",),
        300,
    ),
    Bench(
        'bench.ago --resume --cases pair --contenders lowtide "lowtide NI" "lowtide NR" onnxruntime openvino --save ago_pairs',
        ("ago_pairs",),
    ),
    Bench("bench.ago.tuning", ("ago_tuning",)),
    Bench("bench.ago.memory", ("ago_memory",)),
    Bench("bench.ago.compiling", ("ago_compiling",)),
    Bench("bench.ago.partitions", ("ago_partitions",)),
    Bench("bench.serve", ("serve",)),
    Bench("bench.compiled", ("compiled",)),
    Bench("bench.edge_cuts", ("edge_cuts", "edge_cuts_two")),
    Bench("bench.host_bytes", ("host_bytes",)),
)
# What no command alone can do on any machine, and how it is done.
ELSEWHERE = {
    "on_gpu": "make gpu, on a machine with a GPU",
    "survival": "python -m tests.null_cuda python -m bench.on_gpu.survival with transformers and torchvision beside",
    "coverage_torch_2_11": "python -m bench.coverage --only transformers/, in an environment with torch 2.11 and transformers 5.17",
    "coverage_torch_2_15": "python -m bench.coverage --only transformers/, in an environment with torch 2.15 and transformers 5.24",
    "edge": "python -m bench.edge FOLDER, with the files of MLPerf Tiny",
    "device_calls_first_2": "python -m tests.null_cuda python -m bench.device_calls --samples 2",
    "device_calls_bfloat16_first_2": "python -m tests.null_cuda python -m bench.device_calls --dtype bfloat16 --samples 2",
    "device_calls_float16_first_2": "python -m tests.null_cuda python -m bench.device_calls --dtype float16 --samples 2",
}
_ALIKE = ("system", "processor", "cores", "python", "torch")  # of a machine's description; threads are the bench's own choice


def main() -> None:
    options = _options()
    chosen = [bench for bench in BENCHES if any(table.startswith(tuple(options.only)) for table in bench.tables)]
    if options.list:
        for bench in chosen:
            print(f"{bench.command}: {'; '.join(map(_age, bench.tables))}")
        return
    commit = code()
    if not commit or commit.endswith("+"):
        raise SystemExit("bench.rerun: expected a checkout whose lowtide/ is as the commit has it: commit first")
    failed = [bench for bench in chosen if not _is_done(bench, commit) and not _run(bench, commit)]
    subprocess.run([sys.executable, "-m", "bench.tables"], cwd=_ROOT, check=True)
    for bench in failed:
        print(f"failed: {bench.command}: {_log(bench, commit)}")
    sys.exit(1 if failed else 0)


def is_of(document: dict[str, Any], commit: str, here: dict[str, Any]) -> bool:
    """Whether a saved table is of this commit and machine, all its rows."""
    rows = document.get("rows", ())
    same = all(document["machine"].get(name) == here.get(name) for name in _ALIKE)
    return same and document.get("code") == commit and all(row.get("code", commit) == commit for row in rows)


def _is_done(bench: Bench, commit: str) -> bool:
    return all((document := _document(name)) is not None and is_of(document, commit, machine()) for name in bench.tables)


def _run(bench: Bench, commit: str) -> bool:
    """Whether it ended well; then its tables are in place."""
    folder = _log(bench, commit).parent
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    print(f"{bench.command} ...", end=" ", flush=True)
    with _log(bench, commit).open("w") as log:
        try:
            command = [sys.executable, "-W", "ignore", "-m", *shlex.split(bench.command)]
            environment = os.environ | {FOLDER_VARIABLE: str(folder)}
            status = subprocess.run(
                command, cwd=_ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=60 * bench.most_minutes
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
    lacking = [name for name in bench.tables if not (folder / f"{name}.json").exists()]
    print(f"{(time.monotonic() - began) / 60:.1f} min{f', ended with {status}' if status else ''}{' '.join(['', *lacking])}", flush=True)
    if status or lacking:
        return False
    put_in_place(folder, RESULTS)
    return True


def put_in_place(folder: Path, results: Path) -> None:
    """Move all that a bench has saved to the results, each file whole at every moment."""
    for path in sorted(folder.rglob("*")):
        target = results / path.relative_to(folder)
        if path.is_file() and path.suffix in (".json", ".png"):
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_suffix(f".{os.getpid()}.part")
            shutil.copyfile(path, part)
            os.replace(part, target)


def _log(bench: Bench, commit: str) -> Path:
    return _STAGED / commit / bench.tables[0] / "log.txt"


def _age(name: str) -> str:
    document = _document(name)
    if document is None:
        return f"{name} is not there"
    on = document["machine"]
    return f"{name} is of {document.get('code') or 'a commit that was not noted'}, {on['processor']}, torch {on['torch']}"


def _document(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.rerun", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="TABLE", help="tables whose name begins so")
    parser.add_argument("--list", action="store_true", help="say how old each table is, and run nothing")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
