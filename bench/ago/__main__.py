"""Inference of one example on a CPU, side by side: lowtide, its ablations, and what people deploy.

    python -m bench.ago --prepare                                  # export the networks once, fill compilers' caches
    python -m bench.ago --threads 1 2                              # all contenders, in turns
    python -m bench.ago --resume                                   # what is lacking
    python -m bench.ago --contenders lowtide openvino --cases mobilenet_v2 --rounds 8
    python -m bench.ago --cases pair --contenders lowtide "lowtide NI" "lowtide NR" onnxruntime openvino --save ago_pairs
    python -m bench.ago --cases efficientnet ghostnet mobilenetv3 edgenext repvgg regnety resnet18 convnext --save ago_others
    python -m bench.ago --contenders lowtide onnxruntime openvino ncnn MNN --save ago_phones  # pip install ncnn pnnx MNN

On each network each contender is a process of its own; they take turns of some 60 ms. A time is the median over turns of a turn's median, a
ratio the median over turns of its time to the best peer's. Results are compared with float64's. A contender that takes longer than --limit
seconds to be ready has failed on that network. The table is saved after each network; --resume goes on with those that it lacks.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.ago.contenders import OURS, PEERS, reference
from bench.ago.export import deviation, export
from bench.ago.networks import all_cases, paper_cases
from bench.ago.worker import Worker
from bench.results import Results, with_kept

COLUMNS = ("case", "threads", "contender", "time_us", "spread_us", "to_best_peer", "deviation", "ready_s", "failed")
_MOST_S = 240  # to fill caches for one network
_PAUSE_S = 0.02  # the pools of the last contender stop spinning


def main() -> None:
    options = _options()
    names = [each.name for each in all_cases() if any(each.name.startswith(wanted) for wanted in options.cases)]
    names = names or [each.name for each in paper_cases()]
    for name in names:
        export(name, options.folder)
    if options.prepare:
        _fill_caches(names, options)
        return
    for threads in options.threads:
        for name in names:
            if not (options.resume and _is_there(options.save, name, threads, options.contenders)):
                _save(options.save, _measured(name, threads, options))
    print(f"geometric mean of lowtide over the best peer: {_summary(options.save, names)}")


def _is_there(table: str, name: str, threads: int, contenders: Sequence[str]) -> bool:
    """Whether a table has all contenders of a network."""
    found = {row["contender"] for row in with_kept(table, (), ()) if row["case"] == name and row["threads"] == threads}
    return found >= set(contenders)


def _save(table: str, rows: Sequence[dict[str, Any]]) -> None:
    notes = tuple((__doc__ or "").strip().split("\n\n")[-1].split("\n"))
    kept = with_kept(table, rows, ("case", "threads", "contender"))
    Results(table, "Inference of one example on a CPU", COLUMNS, tuple(kept), notes).save()


def _measured(name: str, threads: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    workers = [Worker(contender, threads, options.folder) for contender in options.contenders]
    try:
        rows = _case(name, threads, workers, options)
    finally:
        for worker in workers:
            worker.close()
    for row in rows:
        shown = f"{row['time_us']:10,.0f} us" if row.get("time_us") else row.get("failed", "")
        print(f"{name:24} {threads} {row['contender']:12} {shown}  {row.get('to_best_peer') or '':.5}", flush=True)
    return rows


def _case(name: str, threads: int, workers: Sequence[Worker], options: argparse.Namespace) -> list[dict[str, Any]]:
    expected, first = reference(name, options.folder), {}
    for worker in workers:
        worker.begin_load(name)
    for worker in workers:
        first[worker] = worker.loaded(options.limit)
    for _ in range(options.rounds):
        for worker in workers:
            if not worker.failed:
                time.sleep(_PAUSE_S)
                worker.burst()
    best = _best_peer(workers)
    rows = []
    for worker in workers:
        row: dict[str, Any] = {"case": name, "threads": threads, "contender": worker.contender, "failed": worker.failed}
        if not worker.failed:
            quartiles = statistics.quantiles(worker.bursts_us, n=4)
            row |= {"time_us": worker.median_us(), "spread_us": (quartiles[2] - quartiles[0]) / 2, "ready_s": first[worker]["ready_s"]}
            row["deviation"] = deviation(first[worker]["output"], expected)
            if best is not None:
                row["to_best_peer"] = statistics.median(a / b for a, b in zip(worker.bursts_us, best.bursts_us, strict=True))
        rows.append(row)
    return rows


def _best_peer(workers: Sequence[Worker]) -> Worker | None:
    peers = [worker for worker in workers if worker.contender in PEERS and not worker.failed]
    return min(peers, key=Worker.median_us, default=None)


def _summary(name: str, wanted: Sequence[str]) -> str:
    """By threads, the geometric mean over some cases, and the greatest."""
    rows, said = with_kept(name, (), ()), []
    for threads in sorted({row["threads"] for row in rows}):
        ratios = [
            row["to_best_peer"] for row in rows if row["threads"] == threads and row["contender"] == "lowtide" and row["case"] in wanted
        ]
        found = [float(ratio) for ratio in ratios if ratio is not None]
        if found:
            said.append(f"{threads}: {statistics.geometric_mean(found):.3f} of {len(found)} (greatest {max(found):.2f})")
    return "; ".join(said) or "not measured"


def _fill_caches(names: Sequence[str], options: argparse.Namespace) -> None:
    """Compilers keep what they made on disk: later processes are ready sooner. Each contender in a process of its own."""
    code = (
        "import sys; from pathlib import Path; from bench.ago.contenders import make\n"
        "for name in sys.argv[4:]:\n"
        "    make(sys.argv[1], name, int(sys.argv[2]), Path(sys.argv[3]))(); print(*sys.argv[1:3], name, flush=True)"
    )
    for threads in options.threads:
        for contender in (each for each in options.contenders if each not in ("eager", "onnxruntime", "openvino")):
            for name in names:
                command = [sys.executable, "-W", "ignore", "-c", code, contender, str(threads), str(options.folder), name]
                try:
                    subprocess.run(command, check=False, timeout=_MOST_S)
                except subprocess.TimeoutExpired:
                    print(contender, name, f"took more than {_MOST_S} s", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.ago", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", nargs="*", default=[], help="names, or how they begin; without, the paper's fourteen")
    parser.add_argument(
        "--contenders", nargs="*", default=["eager", "inductor", "onnxruntime", "openvino", "lowtide"], choices=(*PEERS, *OURS)
    )
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a contender may take to be ready")
    parser.add_argument("--resume", action="store_true", help="leave out what the table has already")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "lowtide-ago", help="where exported networks lie")
    parser.add_argument("--save", default="ago", help="the name of the table")
    parser.add_argument("--prepare", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
