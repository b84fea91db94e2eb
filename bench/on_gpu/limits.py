"""Training within limits: time and memory, promised and measured, beside eager and what people use."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import lowtide
from bench.budget_settings import checkpoint_blocks
from bench.models import MODELS
from bench.models.language import language_model
from bench.models.workload import Entry, Workload, keyword_loss, labels
from bench.on_gpu.ground import Ground, Row
from bench.results import load
from lowtide.api import compare

SHARES = (100, 80, 60, 40, 20)  # per cent of what a step makes, beside what the caller holds
PEERS = ("inductor", "checkpoint", "save_on_cpu")
_TINY_LLAMA = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
    "vocab_size": 32000,
}  # fmt: skip


@dataclass(frozen=True)
class Network:
    """A network at its batch."""

    name: str
    entry: Entry
    batch_size: int
    stand_in: str  # of the coverage bench
    gib: int  # of the device's memory that a process holds which trains it by turns, its activations let go
    channels_last: bool = False


def _tokens(vocabulary: int, batch_size: int) -> tuple[torch.Tensor, ...]:
    tokens = labels(vocabulary, batch_size, 1024)
    return tokens, tokens.clone()


def _generator(name: str, make: Callable[[], nn.Module], vocabulary: int) -> Entry:
    return Entry(name, make, partial(_tokens, vocabulary), keyword_loss("input_ids", "labels", use_cache=False), "1024 tokens")


NETWORKS = (
    Network("gpt2", _generator("gpt2", partial(language_model, "GPT2LMHeadModel", "GPT2Config"), 50257), 8, "transformers/gpt2/causal", 4),
    Network("resnet50", MODELS["resnet50"], 64, "timm/resnext26ts", 3, channels_last=True),
    Network(
        "llama-1.1B", _generator("llama", partial(language_model, "LlamaForCausalLM", "LlamaConfig", **_TINY_LLAMA), 32000), 4,
        "transformers/smollm3/causal", 20,
    ),
    Network("vit_b_16", MODELS["vit_b_16"], 64, "transformers/dinov2/pictures", 4),
    Network("bert-base", MODELS["bert-base"], 32, "transformers/roberta/masked", 4),
)  # fmt: skip


def work_of(network: Network, ground: Ground) -> compare.Workload:
    """Trained by AdamW; on a GPU under autocast to bfloat16."""
    made: Workload = ground.subject(network.stand_in) if ground.dry else network.entry.build(network.batch_size, ground.device)
    batch: tuple[Any, ...] = made.batch
    if network.channels_last and ground.on_gpu:
        made.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        batch = tuple(item.contiguous(memory_format=torch.channels_last) if item.ndim == 4 else item for item in batch)

    def loss(model: nn.Module, *items: torch.Tensor) -> torch.Tensor:
        with torch.autocast(ground.device, torch.bfloat16, enabled=ground.on_gpu):
            return made.loss(model, *items)

    return compare.Workload(made.model, batch, loss, torch.optim.AdamW(made.model.parameters(), lr=1e-4))


def rows(network: Network, ground: Ground) -> Iterator[Row]:
    """Eager, no limit and each limit: all of one captured program."""
    work = work_of(network, ground)
    assert work.optimizer is not None, "it trains"
    eager = compare.eager_step(work)
    eager()  # the optimizer's state
    with ground.alone():
        taken, eager_bytes = ground.in_turns_ms({"": eager})[""], ground.above_bytes(eager)
        yield {"setting": "eager", "verdict": "measured", "step_ms": taken, "measured_bytes": eager_bytes}
    for group in work.optimizer.param_groups:
        group["foreach"] = False
    clock = time.monotonic()
    step = lowtide.optimize(work.model, work.batch, loss=work.loss, optimizer=work.optimizer, planning=lowtide.Planning(progress=False))
    yield {"setting": "no limit"} | _measured(step, partial(step, *work.batch), taken, ground, clock)
    held_bytes = step.plan.resident_bytes
    limits = {f"{share}%": share * (step.plan.eager_peak_bytes - held_bytes) // 100 for share in SHARES}
    for setting, limit_bytes in {**_checkpointing(network), **limits}.items():
        clock = time.monotonic()
        try:
            limited = step.at(held_bytes + limit_bytes)
        except lowtide.BudgetError as error:
            yield {"setting": setting, "verdict": "does not fit", "why": str(error).splitlines()[0]}
            continue
        yield {"setting": setting} | _measured(limited, partial(limited, *work.batch), taken, ground, clock)


def _checkpointing(network: Network) -> Row:
    """What was measured of checkpointing, as a limit."""
    try:
        saved = load("on_gpu").rows
    except FileNotFoundError:
        return {}
    found = [row["measured_bytes"] for row in saved if row["part"] == f"peers: {network.name}, checkpoint"]
    return {"as checkpointing": found[0]} if any(found) else {}


def _measured(step: Any, call: Callable[[], Any], eager_ms: float, ground: Ground, clock: float) -> Row:
    """What one limit gives. Ratios are over eager's time and over what is promised of the fastest order."""
    planned_s = time.monotonic() - clock
    plan, report = step.plan, step.plan.cost_report
    promised, taken = plan.peak_bytes - plan.resident_bytes, 0.0
    with ground.alone():
        measured = ground.above_bytes(call, step.empty_arena)
        taken = ground.in_turns_ms({"": call})[""]
        reserved = ground.reserved_bytes(call)
    promises: Row = {}
    if report is not None:
        ratio = report.time_us / report.order_us
        promises = {"promised_ms": report.time_us / 1e3, "promised_ratio": ratio, "recomputed": report.recomputed}
    return promises | {
        "verdict": "kept" if abs(measured - promised) <= max(0.01 * measured, 2**20) else "off",
        "promised_bytes": promised,
        "measured_bytes": measured,
        "reserved_bytes": reserved,
        "measured_ratio": taken / eager_ms,
        "step_ms": taken,
        "seconds": round(planned_s, 1),
        "operators": len(plan.graph.nodes),
    }


def peer_rows(network: Network, peer: str, ground: Ground) -> Iterator[Row]:
    """What people use in its place: one row."""
    if peer == "inductor" and ground.computes_nothing:
        yield {"setting": peer, "verdict": "left out", "why": "the null device's environment has no Triton"}
        return
    changed = _as(peer, work_of(network, ground))
    changed()  # what it compiles, it compiles beside others
    with ground.alone():
        yield {
            "setting": peer,
            "verdict": "measured",
            "measured_bytes": ground.above_bytes(changed),
            "step_ms": ground.in_turns_ms({"": changed})[""],
            "reserved_bytes": ground.reserved_bytes(changed),
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
