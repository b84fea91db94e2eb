"""A step of lowtide's as one CUDA graph: small batches, where launches are what takes time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import lowtide
from bench.models import MODELS
from bench.models.workload import plain_sgd
from bench.on_gpu.ground import Ground, Row
from lowtide.api import compare

CASES = (("resnet50", 2, "timm/resnext26ts"), ("gpt2", 1, "transformers/gpt2/causal"), ("mobilenet_v2", 2, "torchvision/mnasnet0_5"))


def rows(network: str, batch_size: int, stand_in: str, ground: Ground) -> Iterator[Row]:
    """Eager, lowtide, lowtide in a graph, and torch.compile's own graphs."""
    calls: dict[str, Callable[[], Any]] = {}
    for name, make in (("eager", compare.eager_step), ("lowtide", _lowtide), ("lowtide, graph", partial(_lowtide, graph="auto"))):
        calls[name] = make(_work(network, batch_size, stand_in, ground))
    if not ground.dry:
        calls["reduce-overhead"] = _compiled(_work(network, batch_size, stand_in, ground))
    times = ground.in_turns_ms(calls, 20)
    for name, taken in times.items():
        yield {"setting": name, "verdict": "measured", "step_ms": taken, "measured_ratio": taken / times["eager"]}


def _work(network: str, batch_size: int, stand_in: str, ground: Ground) -> compare.Workload:
    made = ground.subject(stand_in) if ground.dry else ground.moved(MODELS[network].build(batch_size))
    return compare.Workload(made.model, made.batch, made.loss, plain_sgd(made.model))


def _lowtide(work: compare.Workload, graph: str = "never") -> Callable[[], Any]:
    """The step, with its batch; as a graph it is captured before it is timed."""
    options: dict[str, Any] = {"planning": lowtide.Planning(progress=False), "run": lowtide.Run(graph=graph)}
    step = lowtide.optimize(work.model, work.batch, loss=work.loss, optimizer=work.optimizer, **options)
    for _ in range(3):
        step(*work.batch)
    return partial(step, *work.batch)


def _compiled(work: compare.Workload) -> Callable[[], Any]:
    compiled: Any = torch.compile(work.model, mode="reduce-overhead")
    loss = work.loss
    assert loss is not None, "workloads of the bench train"
    return compare.eager_step(compare.Workload(work.model, work.batch, lambda _, *batch: loss(compiled, *batch), work.optimizer))
