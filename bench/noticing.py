"""What it costs to notice changes: the time in which a call makes sure that its program is still the right one.

    python -m bench.noticing [--repeats 200]

`asked_us` is each call's price where nothing was put elsewhere: identities are compared. `looked_us` is paid where something was, and all
has to be looked at anew: after a counter that the program does not read has changed, say. Medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.models import MODELS
from bench.models.workload import plain_sgd
from bench.results import Results
from lowtide import optimize
from lowtide.runtime.caller import Caller
from lowtide.runtime.unchanged.granted import Granted
from lowtide.runtime.unchanged.look import EVERYTHING

COLUMNS = ("model", "modules", "parameters", "asked_us", "looked_us", "step_us", "share_percent")
NOTES = ("share_percent: of asked_us in step_us", "as if the program read every attribute of every module: most read few")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    rows = (_row("three layers", *_tiny(), options.repeats), _row("gpt2", *_gpt2(), options.repeats))
    results = Results("noticing", "What it costs to notice changes", COLUMNS, rows, NOTES)
    results.save()
    results.print()


def _tiny() -> tuple[nn.Module, Any, Callable[..., Any]]:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), (torch.randn(4, 8),), lambda model, x: model(x).square().mean()


def _gpt2() -> tuple[nn.Module, Any, Callable[..., Any]]:
    made = MODELS["gpt2"].build(2, "cpu")
    return made.model, made.batch, made.loss


def _row(name: str, model: nn.Module, batch: Any, loss: Callable[..., Any], repeats: int) -> dict[str, Any]:
    optimizer = plain_sgd(model)
    step = optimize(model, batch, loss=loss, optimizer=optimizer, progress=False, workspaces=False)
    call = (lambda: step(**batch)) if isinstance(batch, dict) else (lambda: step(*batch))
    call()
    granted = Granted(Caller(model, optimizer), EVERYTHING)

    step_us = _median_us(call, 3 if name == "gpt2" else repeats)
    asked_us = _median_us(granted.holds, repeats)
    return {
        "model": name,
        "modules": len(list(model.modules())),
        "parameters": len(list(model.parameters())),
        "asked_us": asked_us,
        "looked_us": _median_us(granted.change, max(3, repeats // 10)),
        "step_us": step_us,
        "share_percent": 100 * asked_us / step_us,
    }


def _median_us(call: Callable[[], object], repeats: int) -> float:
    """The median time of a call."""
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return 1e6 * statistics.median(samples)


if __name__ == "__main__":
    main()
