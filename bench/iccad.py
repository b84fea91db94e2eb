"""The tables of the ICCAD'23 paper, redone beside the paper's own figures.

    python -m bench.iccad [--tables II III real fig9 IV V VI] [--seconds 10]

II: least peaks; III: seconds to find them; real: the networks that timm builds, captured; fig9: operators after fusion; IV: the integer
program with and without partition, fusion and pruning; V: two ways to partition; VI: numbers of parts. `--seconds` caps each call of a
reference solver. All tables go to `bench/results/iccad.json`; those that were not asked for stay there as they were.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench import iccad_parts
from bench.iccad_paper import ROWS, WHICH, Row
from bench.iccad_tools import exact, kib, timed, warm_up
from bench.machine import code, machine
from bench.networks import PROBLEMS
from bench.results import RESULTS, Cell, Results
from bench.yardstick import Yardstick
from lowtide.cost.memory import order_problem
from lowtide.problems import Status
from lowtide.schedule import ProgramOrder, ReversePostOrder
from research.orders.dynamic import DynamicProgramme


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--seconds", type=float, default=10, help="a cap for each call of a reference solver")
    options = parser.parse_args()
    warm_up()
    for name in options.tables:
        results = TABLES[name](options.seconds)
        results.print()
        save({name: results})


def save(tables: Mapping[str, Results], directory: Path = RESULTS) -> Path:
    """Adds tables to the result file, in place of those of the same names; the file is replaced as a whole or not at all."""
    path = directory / "iccad.json"
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["tables"] if path.exists() else {}
    for name, results in tables.items():
        rows = [{column: row.get(column) for column in results.columns} for row in results.rows]
        kept[name] = {"title": results.title, "notes": list(results.notes), "columns": list(results.columns), "rows": rows}
    document = {"machine": machine(), "code": code(), "tables": {name: kept[name] for name in TABLES if name in kept}}
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)
    return path


def table_ii(seconds: float) -> Results:
    """Peaks: as written, reverse post-order in both readings, Serenity's dynamic programme, the optimum."""
    notes = (
        "paper_*: as printed; all in KiB. serenity: the dynamic programme with adaptive soft budget, '-' where its states ran out",
        "reduction: of the optimum against the better of the two reverse post-orders; paper_reduction: against the paper's",
        *WHICH,
    )
    columns = (
        "network", "operators", "paper_rpo", "rpo_inputs", "rpo_outputs", "as_written", "paper_serenity", "serenity", "paper_hmcos",
        "paper_ours", "optimum", "status", "paper_reduction", "reduction",
    )  # fmt: skip
    return Results("iccad_II", "Table II: peak memory, KiB", columns, tuple(_peaks(row, seconds) for row in ROWS), notes)


def _peaks(row: Row, seconds: float) -> dict[str, Cell]:
    problem = PROBLEMS[row.rebuilt].problem()
    inputs, outputs, written = (
        kib(solver.solve(problem), problem) for solver in (ReversePostOrder("inputs"), ReversePostOrder("outputs"), ProgramOrder())
    )
    serenity, best = DynamicProgramme().solve(problem), exact(seconds).solve(problem)
    return {
        "network": row.network,
        "operators": problem.node_count,
        "paper_rpo": row.rpo_kib,
        "rpo_inputs": inputs,
        "rpo_outputs": outputs,
        "as_written": written,
        "paper_serenity": row.serenity_kib,
        "serenity": kib(serenity, problem) if serenity.status is Status.OPTIMAL else None,
        "paper_hmcos": row.hmcos_kib,
        "paper_ours": row.ours_kib,
        "optimum": kib(best, problem),
        "status": best.status.name.lower(),
        "paper_reduction": 1 - row.ours_kib / row.rpo_kib,
        "reduction": 1 - kib(best, problem) / min(inputs, outputs),
    }


def table_iii(seconds: float) -> Results:
    """Seconds to the proven optimum."""
    with tempfile.TemporaryDirectory() as folder:
        yardstick = Yardstick.build(Path(folder))
        warm_up(DynamicProgramme(max_states=1000))
        rows = tuple(_times(row, yardstick, seconds) for row in ROWS)
    notes = (
        "paper_*: on the authors' machine, Gurobi; their answer for HRNet-W18-V2 is not the least, by their own Table V",
        "exact_s: proof included, kernels compiled before; serenity_s: in brackets where it gave up after 4,000,000 states",
        "yardstick_s: the search in C++, '-' where there is no g++",
    )
    columns = ("network", "paper_hmcos_s", "paper_ours_s", "serenity_s", "yardstick_s", "exact_s", "states", "status")
    return Results("iccad_III", "Table III: scheduling time, seconds", columns, rows, notes)


def _times(row: Row, yardstick: Yardstick | None, seconds: float) -> dict[str, Cell]:
    problem = PROBLEMS[row.rebuilt].problem()
    serenity, serenity_s = timed(DynamicProgramme(), problem)
    best, exact_s = timed(exact(seconds), problem)
    return {
        "network": row.network,
        "paper_hmcos_s": "30000+" if row.hmcos_s is None else row.hmcos_s,
        "paper_ours_s": row.ours_s,
        "serenity_s": serenity_s if serenity.status is Status.OPTIMAL else f"({serenity_s:.3f})",
        "yardstick_s": None if yardstick is None else yardstick.solve(problem, seconds).seconds,
        "exact_s": exact_s,
        "states": best.stats.get("states", 0),
        "status": best.status.name.lower(),
    }


def table_real(seconds: float) -> Results:
    """The networks as timm builds them, captured for inference; what is resident (weights, the picture) is left out."""
    from bench.networks import real

    columns = ("network", "batch_norm", "operators", "rpo_inputs", "rpo_outputs", "as_written", "optimum", "status", "exact_s")
    title = "The real networks, captured: peak memory, KiB"
    if not real.has_timm():
        return Results("iccad_real", title, columns, (), ("timm is not installed: pip install timm --no-deps",))
    rows = tuple(_captured(name, fold, seconds) for name in real.SIDES for fold in (True, False))
    notes = (
        "timm adds in place (`out += shortcut`), the shapes of Table II do not: with additions not in place, the folded hrnet_w18_small has"
        " the paper's optimum of 6368 KiB",
        "timm's stage 1 of HRNet-W18-V2 and W32 has 64 channels and alone decides the peak, whatever the order; the paper's has 32",
    )
    return Results("iccad_real", title, columns, rows, notes)


def _captured(name: str, fold: bool, seconds: float) -> dict[str, Cell]:
    from bench.networks import real

    problem = order_problem(real.captured(name, fold=fold))
    best, exact_s = timed(exact(seconds), problem)
    simple = (ReversePostOrder("inputs"), ReversePostOrder("outputs"), ProgramOrder())
    peaks = dict(zip(("rpo_inputs", "rpo_outputs", "as_written"), (kib(solver.solve(problem), problem) for solver in simple), strict=True))
    return {
        "network": name,
        "batch_norm": "folded" if fold else "apart",
        "operators": problem.node_count,
        **peaks,
        "optimum": kib(best, problem),
        "status": best.status.name.lower(),
        "exact_s": exact_s,
    }


TABLES: dict[str, Callable[[float], Results]] = {
    "II": table_ii,
    "III": table_iii,
    "real": table_real,
    "fig9": iccad_parts.figure_9,
    "IV": iccad_parts.table_iv,
    "V": iccad_parts.table_v,
    "VI": iccad_parts.table_vi,
}


if __name__ == "__main__":
    main()
