"""Is it the same training? Three steps of every model of the list, eager and optimized from the same seed, compared bit for bit.

    python -m bench.equal [--models NAME ...] [--batch-size 2] [--steps 3]

Compared are losses, parameters, buffers, optimizer state and the random generator's state; dropout is on. The optimizers take turns
over the models. Models that do not fit into memory are left out and named.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.bits import same_bits
from bench.memory import available_bytes
from bench.models import MODELS
from bench.results import Results
from lowtide import optimize
from lowtide.api.compare import Workload, eager_step

COLUMNS = ("model", "batch_size", "optimizer", "steps", "tensors", "different", "first_different", "seconds")
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
    options = parser.parse_args()
    rows = []
    for turn, name in enumerate(options.models):
        rows.append(row(name, options.batch_size, options.steps, *OPTIMIZERS[turn % len(OPTIMIZERS)]))
        print(rows[-1], flush=True)
        results = Results(
            "equal",
            "Three steps, eager and optimized, bit for bit",
            COLUMNS,
            tuple(rows),
            ("different: tensors that are not equal to the last bit",),
        )
        results.save()
    results.print()


def row(name: str, batch_size: int, steps: int, optimizer_name: str, make: Callable[[Any], torch.optim.Optimizer]) -> dict[str, Any]:
    """Train twice and compare."""
    start = time.perf_counter()
    found: dict[str, Any] = {"model": name, "batch_size": batch_size, "optimizer": optimizer_name, "steps": steps}
    parameters = MODELS[name].build(batch_size, "meta").model.parameters()
    if _COPIES * sum(parameter.nbytes for parameter in parameters) > 0.7 * available_bytes():
        return found | {"first_different": "does not fit into this machine"}
    expected = _trained(name, batch_size, steps, make, optimized=False)
    gc.collect()
    got = _trained(name, batch_size, steps, make, optimized=True)
    different = [key for key in expected | got if key not in expected or key not in got or not same_bits(expected[key], got[key])]
    return found | {
        "tensors": len(expected),
        "different": len(different),
        "first_different": different[0] if different else "",
        "seconds": round(time.perf_counter() - start, 1),
    }


def _trained(
    name: str, batch_size: int, steps: int, make: Callable[[Any], torch.optim.Optimizer], optimized: bool
) -> dict[str, torch.Tensor]:
    """All that training leaves, by name."""
    made = MODELS[name].build(batch_size)
    work = Workload(made.model, made.batch, made.loss, make(made.model.parameters()))
    assert work.optimizer is not None
    call = _optimized_step(work) if optimized else eager_step(work)
    torch.manual_seed(1)
    losses = [call() for _ in range(steps)]
    found = {f"loss {index}": loss for index, loss in enumerate(losses)} | {"random state": torch.get_rng_state()}
    found |= {f"model {key}": tensor for key, tensor in work.model.state_dict().items()}
    for index, entries in work.optimizer.state_dict()["state"].items():
        found |= {f"optimizer {index} {key}": item for key, item in entries.items() if isinstance(item, torch.Tensor)}
    return found


def _optimized_step(work: Workload) -> Callable[[], Any]:
    step = optimize(work.model, work.batch, loss=work.loss, optimizer=work.optimizer, progress=False)
    return lambda: step(*work.batch)


if __name__ == "__main__":
    main()
