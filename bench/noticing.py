"""What it costs to notice changes: the time in which a call makes sure that its program is still the right one.

    python -m bench.noticing [--repeats 200]

`asked_us` is each call's price where nothing was put elsewhere: identities are compared, of the model's attributes and of what the loss
reads beside it (`beside_us` of them, at `places`). `looked_us` is paid where something was, and all has to be looked at anew: after a
counter that the program does not read has changed, say. `second_ms` is what it takes to capture the step once more, to see that it is the
same program: at the second call, then within a hundredth of the time that steps take. Medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import lowtide
from bench.models import MODELS
from bench.models.workload import plain_sgd
from bench.results import Results
from lowtide import optimize
from lowtide.runtime.caller import Caller
from lowtide.runtime.premises import EVERYTHING, Premises

COLUMNS = (
    "model", "modules", "parameters", "places", "asked_us", "beside_us", "looked_us", "step_us", "share_percent", "capture_ms", "second_ms",
)  # fmt: skip
NOTES = (
    "share_percent: of asked_us in step_us", "as if the program read every attribute of every module: most read few",
    "capture_ms: what the capture within optimize took",
)  # fmt: skip


class Criterion(nn.Module):
    """A loss with settings of its own, as people keep them beside the model."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.loss, self.scale = loss, 1.0

    def forward(self, model: nn.Module, *batch: Any, **more: Any) -> Any:
        return self.loss(model, *batch, **more) * self.scale


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
    optimizer, criterion = plain_sgd(model), Criterion(loss)
    step = optimize(
        model,
        batch,
        loss=criterion,
        optimizer=optimizer,
        planning=lowtide.Planning(progress=False, workspaces=False),
        run=lowtide.Run(check="never"),
    )
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    call = lambda: step(*args, **kwargs)  # noqa: E731
    call()
    captured = step._lookup.families[0].variants[-1].captured
    premises = Premises(Caller(model, optimizer), EVERYTHING, captured.beside)

    few = 3 if name == "gpt2" else max(3, repeats // 10)
    step_us = _median_us(call, 3 if name == "gpt2" else repeats)
    asked_us = _median_us(premises.holds, repeats)
    return {
        "model": name,
        "modules": len(list(model.modules())),
        "parameters": len(list(model.parameters())),
        "places": len(captured.beside.places),
        "asked_us": asked_us,
        "beside_us": _median_us(premises.beside.holds, repeats),
        "looked_us": _median_us(premises.change, max(3, repeats // 10)),
        "step_us": step_us,
        "share_percent": 100 * asked_us / step_us,
        "capture_ms": 1e3 * step.seconds["capture"],
        "second_ms": _median_us(lambda: step._maker.difference(captured, args, kwargs), few) / 1e3,
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
