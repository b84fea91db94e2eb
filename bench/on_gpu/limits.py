"""Recomputation and swapping under limits: peak and time, promised and measured, beside eager and what people use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import lowtide
from bench.budget_settings import checkpoint_blocks
from bench.models import MODELS
from bench.models.explicit import GPT_NEO_13
from bench.models.workload import Entry, Workload, plain_sgd
from bench.on_gpu.ground import Ground, Row
from lowtide.api import compare

SHARES = ("80%", "60%", "40%", "20%")
PEERS = ("checkpoint", "save_on_cpu", "budget 0.5", "budget 0.2", "inductor")


@dataclass(frozen=True)
class Network:
    """One of MAGIS's, at its batch."""

    name: str
    entry: Entry
    batch_size: int
    stand_in: str  # of the coverage bench


NETWORKS = (
    Network("resnet50", MODELS["resnet50"], 64, "timm/resnext26ts"),
    Network("bert-base", MODELS["bert-base"], 32, "transformers/roberta/masked"),
    Network("vit_b_16", MODELS["vit_b_16"], 64, "transformers/dinov2/pictures"),
    Network("unet", MODELS["unet"], 32, "timm/dla34"),
    Network("gpt-neo-1.3B", GPT_NEO_13, 32, "transformers/gpt_bigcode/causal"),
)


def _work(network: Network, ground: Ground) -> compare.Workload:
    made: Workload = ground.subject(network.stand_in) if ground.dry else network.entry.build(network.batch_size, ground.device)
    return compare.Workload(made.model, made.batch, made.loss, plain_sgd(made.model))


def rows(network: Network, ground: Ground) -> Iterator[Row]:
    """A row for no limit and for each limit: all of one captured program."""
    work = _work(network, ground)
    eager = compare.eager_step(work)
    eager_bytes = ground.above_bytes(eager)
    step = lowtide.optimize(work.model, work.batch, loss=work.loss, optimizer=work.optimizer, progress=False)
    for share in ("100%", *SHARES):
        try:
            limited = step.at(share)
        except lowtide.BudgetError as error:
            yield {"setting": share, "verdict": "does not fit", "why": str(error).splitlines()[0]}
            continue
        yield {"setting": share} | _measured(limited, partial(limited, *work.batch), eager, eager_bytes, ground)


def _measured(step: Any, call: Callable[[], Any], eager: Callable[[], Any], eager_bytes: int, ground: Ground) -> Row:
    """What one limit gives. Times are over eager's in turns; the promise is over the fastest order's."""
    plan, report = step.plan, step.plan.cost_report
    promised = plan.peak_bytes - plan.resident_bytes
    measured = ground.above_bytes(call)
    times = ground.in_turns_ms({"eager": eager, "lowtide": call})
    return {
        "verdict": "kept" if abs(measured - promised) <= max(0.01 * measured, 2**20) else "off",
        "promised_bytes": promised,
        "measured_bytes": measured,
        "reserved_bytes": ground.reserved_bytes(call),
        "eager_bytes": eager_bytes,
        "promised_ratio": report.time_us / report.order_us if report else 1.0,
        "measured_ratio": times["lowtide"] / times["eager"],
        "step_ms": times["lowtide"],
        "recomputed": report.recomputed if report else 0,
    }


def peer_rows(network: Network, peer: str, ground: Ground) -> Iterator[Row]:
    """What people use in its place: one row."""
    work = _work(network, ground)
    eager = compare.eager_step(_work(network, ground))
    changed = _as(peer, work)
    measured = ground.above_bytes(changed)
    times = ground.in_turns_ms({"eager": eager, "peer": changed})
    yield {
        "setting": peer,
        "verdict": "measured",
        "measured_bytes": measured,
        "reserved_bytes": ground.reserved_bytes(changed),
        "measured_ratio": times["peer"] / times["eager"],
        "step_ms": times["peer"],
    }


def _as(peer: str, work: compare.Workload) -> Callable[[], Any]:
    """A step in the peer's manner. Raises ValueError where the network gives it nothing to work on."""
    model, loss, around = work.model, work.loss, contextlib.nullcontext
    assert loss is not None, "workloads of the bench train"
    assert work.optimizer is not None, "workloads of the bench train"
    if peer == "checkpoint" and not checkpoint_blocks(model):
        raise ValueError("no repeated blocks")
    if peer.startswith("budget") or peer == "inductor":
        from torch._functorch import config

        config.activation_memory_budget = float(peer.split()[1]) if peer.startswith("budget") else 1.0
        model = torch.compile(model, backend="inductor" if peer == "inductor" else "aot_eager")  # type: ignore[assignment]
    if peer == "save_on_cpu":
        around = partial(torch.autograd.graph.save_on_cpu, pin_memory=torch.cuda.is_available())  # type: ignore[assignment]
    optimizer = work.optimizer

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with around():
            value: torch.Tensor = loss(model, *work.batch)
        value.backward()
        optimizer.step()
        return value.detach()

    return step
