"""What memory costs: lowtide under a budget beside what people use today, all measured.

    python -m bench.budget [--models NAME ...] [--steps 5] [--budgets 10] [--peers eager checkpoint aot_eager inductor] [--keep]

One training step with plain SGD. Each row is a process of its own: its peak above what it held before the step, by the allocator's own
count, and the median time of its steps, as wall clock and as processor time. First come the peers: eager PyTorch, one
`torch.utils.checkpoint` for each block, and torch.compile's `activation_memory_budget`. Then lowtide: at as many bytes as each peer took,
and at even steps from its own peak down to the smallest that it finds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bench.memory import touch_memory
from bench.models import MODELS
from bench.models.block_gpt import BLOCK_GPT
from bench.results import Results, load

CASES: Mapping[str, tuple[Any, int]] = {"block-gpt": (BLOCK_GPT, 4)} | {
    name: (MODELS[name], batch)
    for name, batch in (("gpt2", 2), ("bert-base", 4), ("vit_b_16", 4), ("resnet50", 8), ("mobilenet_v2", 16), ("unet", 1))
}
COLUMNS = (
    "model", "batch_size", "setting", "limit_bytes", "peak_bytes", "promised_bytes", "wall_ms", "cpu_ms", "promised_ms", "recomputed",
    "planning_s", "wall_to_eager", "cpu_to_eager", "wall_to_peer", "cpu_to_peer", "failed",
)  # fmt: skip
SHARES = (1.0, 0.5, 0.2, 0.05, 0.0)  # of the activations that torch.compile would save
_WARM_UP = 2
_TIMEOUT_S = 1800


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--budgets", type=int, default=10)
    parser.add_argument("--peers", nargs="+", default=["eager", "checkpoint", "aot_eager", "inductor"])
    parser.add_argument("--keep", action="store_true", help="keep the rows of other models in the saved table")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "SETTING", "LIMIT"), help="one row: for the process of its own")
    options = parser.parse_args()
    if options.one:
        name, setting, limit = options.one
        print(json.dumps(measured(name, setting, float(limit), options.steps)))
        return
    touch_memory()
    rows = [row for row in (load("budget").rows if options.keep else ()) if row["model"] not in options.models]
    for name in options.models:
        for row in rows_of(name, options):
            rows.append(row)
            Results("budget", "What memory costs", COLUMNS, tuple(rows), NOTES).save()
            print({key: value for key, value in row.items() if value is not None}, flush=True)
    load("budget").print()


NOTES = (
    "peak_bytes: above what the process held before the step: gradients, activations, temporaries",
    "promised_ms: by the cost model, operators alone; *_to_eager and *_to_peer: medians over those of eager, or of the peer in the setting",
    "limit_bytes: of lowtide, above what the caller holds; activation_memory_budget is a share of saved activations, not of the peak",
)


def rows_of(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The peers of one model, then lowtide at their peaks and at even budgets."""
    peers: dict[str, dict[str, Any]] = {}
    for setting, value in _peer_settings(options.peers):
        label = f"{setting} {value:g}" if setting in ("aot_eager", "inductor") else setting
        row = peers[label] = _row(name, label, _in_its_own_process(name, setting, value, options.steps), peers.get("eager"))
        yield row
    for label, peer in peers.items():
        if "peak_bytes" in peer:
            found = _in_its_own_process(name, "lowtide", peer["peak_bytes"], options.steps)
            yield _row(name, f"lowtide at {label}", found, peers.get("eager"), peer)
    if options.budgets:
        frontier = _in_its_own_process(name, "frontier", 0, options.steps)
        least, most = frontier["least_bytes"], frontier["most_bytes"]
        for step in range(options.budgets):
            limit = most - (most - least) * step // max(1, options.budgets - 1)
            yield _row(name, "lowtide", _in_its_own_process(name, "lowtide", limit, options.steps), peers.get("eager"))


def _peer_settings(wanted: list[str]) -> Iterator[tuple[str, float]]:
    for setting in wanted:
        for value in SHARES if setting in ("aot_eager", "inductor") else (0.0,):
            yield setting, value


def _row(
    name: str, label: str, found: Mapping[str, Any], eager: Mapping[str, Any] | None, peer: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    row = {"model": name, "batch_size": CASES[name][1], "setting": label, **found}
    for other, ending in ((eager, "eager"), (peer, "peer")):
        for clock in ("wall", "cpu"):
            if other is not None and f"{clock}_ms" in row and f"{clock}_ms" in other:
                row[f"{clock}_to_{ending}"] = row[f"{clock}_ms"] / other[f"{clock}_ms"]
    return row


def _in_its_own_process(name: str, setting: str, limit: float, steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.budget", "--steps", str(steps), "--one", name, setting, str(limit)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {_TIMEOUT_S} s"}
    if done.returncode != 0:
        return {"failed": (done.stderr.strip().splitlines() or [str(done.returncode)])[-1][:200]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def measured(name: str, setting: str, limit: float, steps: int) -> dict[str, Any]:
    """One row: a training in this process."""
    from lowtide.cost.profiler import peak_bytes

    entry, batch_size = CASES[name]
    made = entry.build(batch_size)
    if setting == "frontier":
        return _ends(made)
    call, told = _training(made, setting, limit)
    for _ in range(_WARM_UP):
        call()
    peak = told.pop("measure")() if "measure" in told else peak_bytes(call).peak_bytes
    samples = [_seconds(call) for _ in range(steps)]
    wall, cpu = (statistics.median(sample[clock] for sample in samples) * 1e3 for clock in (0, 1))
    return {"peak_bytes": peak, "wall_ms": wall, "cpu_ms": cpu, **told}


def _training(made: Any, setting: str, limit: float) -> tuple[Callable[[], Any], dict[str, Any]]:
    """One step as a callable, and what is known of it beforehand."""
    import torch

    from lowtide.api.compare import Workload, eager_step, plain_sgd

    model, optimizer = made.model, plain_sgd(made.model)
    if setting == "lowtide":
        return _lowtide(made, optimizer, int(limit))
    if setting == "checkpoint" and not _checkpoint_blocks(model):
        raise SystemExit("no repeated blocks")
    loss = made.loss
    if setting in ("aot_eager", "inductor"):
        import torch._functorch.config

        torch._functorch.config.activation_memory_budget = limit
        compiled = torch.compile(model, backend=setting)
        loss = lambda _, *batch: made.loss(compiled, *batch)  # noqa: E731
    step = eager_step(Workload(model, made.batch, loss, optimizer))

    def call() -> None:
        step()
        optimizer.zero_grad()  # so that the next step starts from what this one did

    return call, {}


def _lowtide(made: Any, optimizer: Any, limit: int) -> tuple[Callable[[], Any], dict[str, Any]]:
    from lowtide import optimize

    resident = _resident_bytes(made)
    start = time.perf_counter()
    step = optimize(made.model, made.batch, loss=made.loss, optimizer=optimizer, memory=resident + limit, progress=False)
    planning_s, trade = time.perf_counter() - start, step.plan.trade
    told = {
        "limit_bytes": limit,
        "promised_bytes": step.plan.peak_bytes - step.plan.resident_bytes,
        "promised_ms": trade.time_us / 1e3,
        "recomputed": trade.recomputed,
        "planning_s": planning_s,
        "measure": lambda: step.measure(*made.batch).peak_bytes,
    }
    return lambda: step(*made.batch), told


def _ends(made: Any) -> dict[str, Any]:
    """The smallest and the largest peak of the frontier, above what is resident."""
    from lowtide import optimize
    from lowtide.api.compare import plain_sgd

    step = optimize(made.model, made.batch, loss=made.loss, optimizer=plain_sgd(made.model), latency=1000, progress=False)
    resident = step.plan.resident_bytes
    return {"least_bytes": step.frontier[0][0] - resident, "most_bytes": step.plan.trade.kept_peak_bytes - resident}


def _resident_bytes(made: Any) -> int:
    """What the caller holds, as the plan counts it: asked of a plan on the spot."""
    from lowtide import optimize
    from lowtide.api.compare import plain_sgd

    plan = optimize(made.model, made.batch, loss=made.loss, optimizer=plain_sgd(made.model), workspaces=False, progress=False).plan
    return int(plan.resident_bytes)


def _checkpoint_blocks(model: Any) -> int:
    """One checkpoint around each of a list of layers of one type, the outermost ones; how many."""
    from functools import partial

    from torch import nn
    from torch.utils.checkpoint import checkpoint

    found = 0
    pending = [model]
    while pending:
        module = pending.pop()
        children = list(module.children())
        kinds = [type(child) for child in children]
        repeated = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) > 1
        for child, kind in zip(children, kinds, strict=True):
            if repeated and kinds.count(kind) > 1 and any(True for _ in child.parameters()):
                child.forward = partial(checkpoint, child.forward, use_reentrant=False)
                found += 1
            else:
                pending.append(child)
    return found


def _seconds(call: Callable[[], Any]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
