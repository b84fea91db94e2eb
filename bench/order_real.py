"""The ordering engine on real training steps: peaks of simple orders, the engine's, its proven bound, and its processor time.

    python -m bench.order_real [--models NAME ...] [--batch-sizes 1 32]

Steps are captured on the meta device, with plain SGD; sizes are those of tensors, without operators' temporaries. All orders are of the
graph that the plan uses. `saving` is against eager PyTorch, which holds all gradients until `optimizer.step()`.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import lowtide
from bench.models import MODELS
from bench.models.workload import plain_sgd
from bench.results import Results
from lowtide import optimize
from lowtide.cost.memory import order_problem
from lowtide.schedule import AUTO, ProgramOrder, ReadyList, ReversePostOrder, schedule
from lowtide.schedule.auto import warm_up

COLUMNS = (
    "model", "batch_size", "operators", "eager_bytes", "program_order_bytes", "ready_list_bytes", "post_order_bytes", "peak_bytes",
    "lower_bound_bytes", "gap_percent", "status", "states", "cpu_s", "saving",
)  # fmt: skip
NOTES = (
    "ready_list, post_order: the better one of two readings",
    "cpu_s: of the engine, processor time, once its kernels are loaded; gap_percent: of the peak over the proven bound",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 32])
    options = parser.parse_args()
    warm_up(AUTO)
    rows = [row(name, batch_size) for batch_size in options.batch_sizes for name in options.models]
    results = Results("order_real", "Orders of real training steps", COLUMNS, tuple(rows), NOTES)
    results.save()
    results.print()


def row(name: str, batch_size: int) -> dict[str, Any]:
    """One training step."""
    made = MODELS[name].build(batch_size, "meta")
    plan = optimize(made.model, made.batch, loss=made.loss, optimizer=plain_sgd(made.model), planning=lowtide.Planning(progress=False)).plan
    problem = order_problem(plan.graph)
    start = time.process_time()
    found = schedule(problem)
    cpu_s = time.process_time() - start
    assert found.peak_bytes == plan.peak_bytes
    return {
        "model": name,
        "batch_size": batch_size,
        "operators": problem.node_count,
        "eager_bytes": plan.eager_peak_bytes,
        "program_order_bytes": schedule(problem, ProgramOrder()).peak_bytes,
        "ready_list_bytes": min(schedule(problem, ReadyList(oldest)).peak_bytes for oldest in ("index", "waiting")),
        "post_order_bytes": min(schedule(problem, ReversePostOrder(root)).peak_bytes for root in ("inputs", "outputs")),
        "peak_bytes": found.peak_bytes,
        "lower_bound_bytes": found.lower_bound_bytes,
        "gap_percent": 100 * (found.peak_bytes / found.lower_bound_bytes - 1),
        "status": found.status.name.lower(),
        "states": found.stats["states"],
        "cpu_s": cpu_s,
        "saving": 1 - found.peak_bytes / plan.eager_peak_bytes,
    }


if __name__ == "__main__":
    main()
