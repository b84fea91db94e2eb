"""MODeL's table (its section 5.5): what order alone saves, on every model of the list, at batch 1 and 32.

    python -m bench.order_only [--models NAME ...] [--batch-sizes 1 32] [--plan-only] [--repeats 3] [--minutes 60]
                               [--patience 60] [--keep]

Each row is a process of its own. It first plans the step under fake tensors; if eager and optimized model fit into memory side by
side and the time allows, both then run for real: peaks by the allocator's own count, step times interleaved.

Accounting: parameters, buffers, optimizer state (none: plain SGD) and the batch are resident and count; eager holds all gradients
until `optimizer.step()`. `ideal_saving` is MODeL's figure: tensors only, as if operators needed no temporaries. `saving` counts
the temporaries that operators were measured to take, in eager and in the plan; it is what an allocator sees, and `measured_saving`
is what it saw.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import lowtide
from bench.memory import available_bytes, touch_memory
from bench.models import MODELS
from bench.results import Results, load

COLUMNS = (
    "model", "batch_size", "operators", "capture_s", "workspace_s", "planning_s", "resident_bytes", "ideal_eager_bytes", "ideal_bytes",
    "ideal_saving", "eager_promised_bytes", "promised_bytes", "saving", "eager_measured_bytes", "measured_bytes", "measured_saving",
    "promise_error", "time_ratio", "eager_ms", "how",
)  # fmt: skip
_SHARE_OF_MEMORY = 0.75
_SHOWN = ("ideal_saving", "saving", "measured_saving", "promise_error", "time_ratio", "how")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--plan-only", action="store_true", help="run nothing for real")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each")
    parser.add_argument("--minutes", type=float, default=60, help="after this time, rows are planned only")
    parser.add_argument("--patience", type=float, default=60, metavar="SECONDS", help="a step that takes longer is not run a dozen times")
    parser.add_argument("--keep", action="store_true", help="keep the rows of the saved table that are not measured now")
    parser.add_argument("--name", default="order_only", help="of the result file")
    parser.add_argument("--row", action="store_true", help="print one row as JSON: for the process of its own")
    options = parser.parse_args()
    if options.row:
        patience_s = 0.0 if options.plan_only else options.patience
        print(json.dumps(row(options.models[0], options.batch_sizes[0], patience_s, options.repeats)))
        return
    table(options)


def table(options: argparse.Namespace) -> None:
    """All rows, saved after each, so that an interrupted run leaves what it has."""
    touch_memory()
    kept = load(options.name).rows if options.keep else ()
    rows: dict[tuple[Any, Any], Mapping[str, Any]] = {(line["model"], line["batch_size"]): line for line in kept}
    start = time.monotonic()
    for batch_size in options.batch_sizes:
        for name in options.models:
            late = time.monotonic() - start > options.minutes * 60
            patience_s = 0.0 if options.plan_only or late else options.patience
            line = rows[name, batch_size] = _in_its_own_process(name, batch_size, patience_s, options.repeats)
            results = Results(options.name, "What order alone saves", COLUMNS, tuple(rows.values()), NOTES)
            results.save()
            print(name, batch_size, {key: line.get(key) for key in _SHOWN}, flush=True)
    results.print()


NOTES = (
    "ideal_saving: promised whole peak against eager's, tensors only, as MODeL counts; saving: the same with operators' temporaries",
    "measured_saving: of measured whole peaks; promise_error: promised over measured peak, minus 1",
    "time_ratio: lowtide's step time over eager's, median of interleaved pairs",
    "how: 'run' where both ran for real, 'planned' where the step was planned under fake tensors only: it does not fit, or takes too long",
)


def _in_its_own_process(name: str, batch_size: int, patience_s: float, repeats: int) -> dict[str, Any]:
    settings = {"--models": name, "--batch-sizes": batch_size, "--repeats": repeats, "--patience": patience_s}
    command = [sys.executable, "-m", "bench.order_only", "--row", *(str(word) for pair in settings.items() for word in pair)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {
            "model": name,
            "batch_size": batch_size,
            "how": f"failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}",
        }
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def row(name: str, batch_size: int, patience_s: float, repeats: int) -> dict[str, Any]:
    """One model at one batch size; run for real unless a step takes longer than `patience_s`."""
    from bench.models.workload import plain_sgd
    from lowtide import optimize
    from lowtide.api.compare import Workload, compare, eager_step

    def built(device: str) -> Workload:
        made = MODELS[name].build(batch_size, device)
        return Workload(made.model, made.batch, made.loss, plain_sgd(made.model))

    def optimized(work: Workload) -> Any:
        return optimize(work.model, work.batch, loss=work.loss, optimizer=work.optimizer, planning=lowtide.Planning(progress=False))

    _warm_up()
    step = optimized(built("meta"))
    found = _planned(name, batch_size, step)
    if patience_s == 0 or 2 * step.plan.resident_bytes + step.plan.eager_peak_bytes > _SHARE_OF_MEMORY * available_bytes():
        return found | {"how": "planned"}
    eager, work = built("cpu"), built("cpu")
    if (seconds := _seconds(eager_step(eager))) > patience_s:
        return found | {"how": f"planned: a step takes {seconds:.0f} s here"}
    step = optimized(work)
    return found | _measured(step, compare(eager, work, step, repeats)) | {"how": "run"}


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _planned(name: str, batch_size: int, step: Any) -> dict[str, Any]:
    """Of a plan under fake tensors."""
    plan = step.plan
    return {
        "model": name,
        "batch_size": batch_size,
        "operators": len(plan.graph.nodes),
        "capture_s": step.seconds["capture"],
        "planning_s": step.seconds["order"],
        "resident_bytes": plan.resident_bytes,
        "ideal_eager_bytes": plan.eager_peak_bytes,
        "ideal_bytes": plan.peak_bytes,
        "ideal_saving": 1 - plan.peak_bytes / plan.eager_peak_bytes,
    }


def _measured(step: Any, compared: Any) -> dict[str, Any]:
    """Of a plan with temporaries, and of the runs."""
    plan = step.plan
    return {
        "workspace_s": step.seconds["measure"],
        "eager_promised_bytes": plan.eager_peak_bytes,
        "promised_bytes": plan.peak_bytes,
        "saving": 1 - plan.peak_bytes / plan.eager_peak_bytes,
        "eager_measured_bytes": compared.eager_measured_peak_bytes,
        "measured_bytes": compared.measured_peak_bytes,
        "measured_saving": compared.saving,
        "promise_error": plan.peak_bytes / compared.measured_peak_bytes - 1,
        "time_ratio": compared.time_ratio,
        "eager_ms": compared.eager_us / 1e3,
    }


def _warm_up() -> None:
    """Load the compiled kernels, so that planning seconds are planning seconds."""
    import torch

    from lowtide import optimize

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimize(
        model, (torch.ones(1, 2),), loss=lambda model, x: model(x).sum(), optimizer=optimizer, planning=lowtide.Planning(progress=False)
    )


if __name__ == "__main__":
    main()
