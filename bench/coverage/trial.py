"""One architecture, eagerly and by lowtide, from the same seed: what became of it, as one line of JSON.

    python -m bench.coverage.trial transformers/bert/masked

Three training steps (momentum, so that there is state) are compared to the last bit: losses, parameters, buffers, the optimizer's state,
the random generator. Then one call of the model in evaluation mode: all tensors of its result. What eager PyTorch does not repeat to the
last bit itself is no measure, and is said.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import lowtide
from bench.bits import same_bits
from bench.coverage.subject import Subject, scalar_loss, tensors_of
from bench.coverage.subjects import SUBJECTS

_STEPS = 3
Outcome = dict[str, Any]


def main() -> None:
    warnings.simplefilter("ignore")
    subject = next(each for each in SUBJECTS if each.name == sys.argv[1])
    print(json.dumps(trial(subject)), flush=True)


def trial(subject: Subject) -> Outcome:
    """What became of one subject: "training" and "inference" hold a verdict each, "why" a reason."""
    start = time.perf_counter()
    training, why, bytes_ = _verdict(lambda planned: _trained(subject, planned))
    inference, why_not, _ = _verdict(lambda planned: _inferred(subject, planned))
    found: Outcome = {"subject": subject.name, "training": training, "why": why, "inference": inference, "why_not_inferred": why_not}
    return found | bytes_ | {"seconds": round(time.perf_counter() - start, 1)}


def _verdict(run: Callable[[bool], tuple[dict[str, torch.Tensor], Outcome]]) -> tuple[str, str, Outcome]:
    """right, different, refused, raised; or that eager cannot do it, or does not repeat it."""
    try:
        expected, _ = run(False)
    except Exception as error:
        return "not in eager", _told(error), {}
    try:
        got, plan = run(True)
    except lowtide.LowtideError as error:
        return "refused", _told(error), {}
    except Exception as error:
        return "raised", _told(error), {}
    different = [key for key in expected | got if key not in expected or key not in got or not same_bits(expected[key], got[key])]
    if not different:
        return "right", "", plan
    again, _ = run(False)
    if any(not same_bits(expected[key], again[key]) for key in expected):
        return "eager differs", "two eager runs are not equal", plan
    return "different", f"{len(different)} of {len(expected)}: {', '.join(different[:3])}", plan


def _told(error: Exception) -> str:
    """In a line, with files of libraries as these name them, wherever they are installed."""
    text = " ".join(str(error).split())
    for folder in sorted(filter(None, sys.path), key=len, reverse=True):
        text = text.replace(f"{folder}/", "")
    return f"{type(error).__name__}: {text[:400]}"


def _trained(subject: Subject, planned: bool) -> tuple[dict[str, torch.Tensor], Outcome]:
    """All that some training steps leave, by name."""
    if subject.train is not None:
        with contextlib.redirect_stdout(io.StringIO()):
            return subject.train(planned), {}
    model, batch = subject.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=False)
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    found: dict[str, torch.Tensor] = {}
    step = (
        lowtide.optimize(model, batch, loss=scalar_loss, optimizer=optimizer, planning=lowtide.Planning(progress=False))
        if planned
        else None
    )
    torch.manual_seed(7)
    for number in range(_STEPS):
        loss = _eager_step(model, optimizer, args, kwargs) if step is None else step(*args, **kwargs)
        found[f"loss {number}"] = loss
    found |= {f"model {key}": item for key, item in model.state_dict().items() if isinstance(item, torch.Tensor)}
    for index, entries in optimizer.state_dict()["state"].items():
        found |= {f"optimizer {index} {key}": item for key, item in entries.items() if isinstance(item, torch.Tensor)}
    found["random state"] = torch.get_rng_state()
    return found, {} if step is None else {"peak_share": round(step.plan.peak_bytes / step.plan.eager_peak_bytes, 3)}


def _eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = scalar_loss(model, *args, **kwargs)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _inferred(subject: Subject, planned: bool) -> tuple[dict[str, torch.Tensor], Outcome]:
    """All tensors of a result, by their place."""
    model, batch = subject.build()
    model.eval()
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    torch.manual_seed(7)
    call = lowtide.optimize(model, batch, planning=lowtide.Planning(progress=False)) if planned else torch.no_grad()(model)
    result = call(*args, **kwargs)
    return {f"result {index}": tensor for index, tensor in enumerate(tensors_of(result))}, {}


if __name__ == "__main__":
    main()
