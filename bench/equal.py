"""Is it the same training? Three steps of every model of the list, eager and optimized from the same seed, compared bit for bit.

    python -m bench.equal [--models NAME ...] [--batch-size 2] [--steps 3] [--latency 1.5] [--arena]

Compared are losses, parameters, buffers, optimizer state and the random generator's state; dropout is on. The optimizers take turns
over the models. With --latency the least memory for so much time is asked for, so that much is computed again; that table is kept apart.
Models that do not fit into memory are left out and named.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.bits import same_bits
from bench.in_values import in_values
from bench.memory import available_bytes
from bench.models import MODELS
from bench.results import Results
from lowtide import optimize
from lowtide.api.compare import Workload, eager_step
from lowtide.plan.plan import Plan

COLUMNS = ("model", "batch_size", "optimizer", "steps", "tensors", "different", "first_different", "recomputed", "peak_share", "seconds")
OPTIMIZERS: tuple[tuple[str, Callable[[Any], torch.optim.Optimizer]], ...] = (
    ("SGD momentum", lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, nesterov=True, weight_decay=1e-4)),
    ("AdamW", lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)),
    ("Adam amsgrad", lambda parameters: torch.optim.Adam(parameters, lr=1e-4, amsgrad=True)),
    ("RMSprop", lambda parameters: torch.optim.RMSprop(parameters, lr=1e-4, centered=True)),
    ("Adagrad", lambda parameters: torch.optim.Adagrad(parameters, lr=1e-3, lr_decay=0.1)),
    ("SGD", lambda parameters: torch.optim.SGD(parameters, lr=1e-3)),
)
_COPIES = 5  # of the parameters, at most: the model, gradients, optimizer state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--latency", type=float, help="the most time, as a multiple of that without recomputation")
    parser.add_argument("--arena", action="store_true", help="in an arena")
    options = parser.parse_args()
    limits = {"latency": options.latency, "arena": "always" if options.arena else "limit"}
    rows = []
    for turn, name in enumerate(options.models):
        rows.append(row(name, options.batch_size, options.steps, *OPTIMIZERS[turn % len(OPTIMIZERS)], limits))
        print(rows[-1], flush=True)
        results = Results(
            "equal" if options.latency is None and not options.arena else "equal_limited",
            "Three steps, eager and optimized, bit for bit",
            COLUMNS,
            tuple(rows),
            ("different: tensors that are not equal to the last bit", f"optimized with {limits}; peak_share: of eager's promised peak"),
        )
        results.save()
    results.print()


def row(
    name: str, batch_size: int, steps: int, optimizer_name: str, make: Callable[[Any], torch.optim.Optimizer], limits: dict[str, Any]
) -> dict[str, Any]:
    """Train twice and compare."""
    start = time.perf_counter()
    found: dict[str, Any] = {"model": name, "batch_size": batch_size, "optimizer": optimizer_name, "steps": steps}
    parameters = MODELS[name].build(batch_size, "meta").model.parameters()
    if _COPIES * sum(parameter.nbytes for parameter in parameters) > 0.7 * available_bytes():
        return found | {"first_different": "does not fit into this machine"}
    expected, _ = _trained(name, batch_size, steps, make, None)
    gc.collect()
    got, plan = _trained(name, batch_size, steps, make, limits)
    different = [key for key in expected | got if key not in expected or key not in got or not same_bits(expected[key], got[key])]
    return found | {
        "tensors": len(expected),
        "different": len(different),
        "first_different": different[0] if different else "",
        "recomputed": plan.cost_report.recomputed if plan is not None and plan.cost_report is not None else 0,
        "peak_share": plan.peak_bytes / plan.eager_peak_bytes if plan is not None else None,
        "seconds": round(time.perf_counter() - start, 1),
    }


def _trained(
    name: str, batch_size: int, steps: int, make: Callable[[Any], torch.optim.Optimizer], limits: dict[str, Any] | None
) -> tuple[dict[str, torch.Tensor], Plan | None]:
    """All that training leaves, by name; eagerly where there are no limits, else by a step whose plan is told."""
    made = MODELS[name].build(batch_size)
    work = Workload(made.model, made.batch, made.loss, make(made.model.parameters()))
    assert work.optimizer is not None
    step = (
        None
        if limits is None
        else optimize(work.model, work.batch, loss=work.loss, optimizer=work.optimizer, **in_values(progress=False, **limits))
    )
    call = eager_step(work) if step is None else partial(step, *work.batch)
    torch.manual_seed(1)
    losses = [call() for _ in range(steps)]
    found = {f"loss {index}": loss for index, loss in enumerate(losses)} | {"random state": torch.get_rng_state()}
    found |= {f"model {key}": tensor for key, tensor in work.model.state_dict().items()}
    for index, entries in work.optimizer.state_dict()["state"].items():
        found |= {f"optimizer {index} {key}": item for key, item in entries.items() if isinstance(item, torch.Tensor)}
    return found, None if step is None else step.plan


if __name__ == "__main__":
    main()
