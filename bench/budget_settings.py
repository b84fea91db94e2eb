"""What people use to train in less memory, and lowtide: each setting makes one training step of a model, as a callable."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lowtide
from bench.models import MODELS, Entry
from bench.models.block_gpt import BLOCK_GPT
from bench.models.large_vocabulary import LLAMA_128K, chunked_loss
from bench.models.workload import Workload

CASES: Mapping[str, tuple[Entry, int]] = {
    "block-gpt": (BLOCK_GPT, 4),
    "llama-128k": (LLAMA_128K, 2),
    "vit_b_16 x 16": (MODELS["vit_b_16"], 16),
} | {
    name: (MODELS[name], batch)
    for name, batch in (("gpt2", 2), ("bert-base", 4), ("vit_b_16", 4), ("resnet50", 8), ("mobilenet_v2", 16), ("unet", 1))
}
SHARES = (1.0, 0.5, 0.2, 0.05, 0.0)  # of the activations that torch.compile would save
COMPILED = ("aot_eager", "inductor")


@dataclass(frozen=True)
class Setting:
    """How to train: what people use, or lowtide within so many bytes above what the caller holds."""

    kind: str  # what people use: "eager", "checkpoint", "auto chunker", one of COMPILED ..; or "lowtide", "lowtide arena", "lowtide parts"
    share: float = 1.0  # activation_memory_budget, of what is compiled
    limit_bytes: int = 0  # of lowtide
    plan: str = ""  # the file of lowtide's plan for that

    @property
    def label(self) -> str:
        """As tables name it."""
        return f"{self.kind} {self.share:g}" if self.kind in COMPILED else self.kind


@dataclass(frozen=True)
class Training:
    """One step as a callable, how to measure its peak, and what is known of it beforehand."""

    step: Callable[[], Any]
    peak_bytes: Callable[[], int]  # above what the caller holds
    told: Mapping[str, Any]


def workload(model: str) -> Workload:
    """A model of the bench with its batch."""
    entry, batch_size = CASES[model]
    return entry.build(batch_size)


def held_bytes(made: Workload) -> int:
    """What the caller holds; plain SGD has no state."""
    held = [tensor.untyped_storage() for tensor in (*made.model.parameters(), *made.model.buffers(), *made.batch)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def training(model: str, setting: Setting) -> Training:
    """A model in a setting, ready to train in this process."""
    made = workload(model)
    if setting.kind.startswith("lowtide"):
        return _of_lowtide(made, setting)
    return _of_torch(made, setting)


def _of_torch(made: Workload, setting: Setting) -> Training:
    from bench.models.workload import plain_sgd
    from lowtide.cost.profiler import measure_memory

    if setting.kind.startswith("checkpoint") and not checkpoint_blocks(made.model):
        raise ValueError("no repeated blocks")
    optimizer, loss = plain_sgd(made.model), _loss(made, setting)
    for group in optimizer.param_groups:
        group["foreach"], group["fused"] = False, False
    kept = setting.kind.endswith("gradients kept")

    def step() -> None:
        loss(*made.batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not kept)  # so that the next step starts from what this one did

    return Training(step, lambda: measure_memory(step).above_bytes, {})


def _loss(made: Workload, setting: Setting) -> Callable[..., Any]:
    if setting.kind == "chunked loss":
        return lambda *batch: chunked_loss(made.model, *batch)
    if setting.kind == "auto chunker":
        return _auto_chunked(made)
    if setting.kind not in COMPILED:
        return lambda *batch: made.loss(made.model, *batch)
    import torch
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = setting.share
    compiled: Any = torch.compile(made.model, backend=setting.kind)
    return lambda *batch: made.loss(compiled, *batch)


def _auto_chunked(made: Workload) -> Callable[..., Any]:
    """Model and loss compiled together by inductor, whose own chunker of large products, which is off by default, is on."""
    import torch
    import torch._inductor.config

    torch._inductor.config.auto_chunker.enable = True
    compiled: Callable[..., Any] = torch.compile(lambda *batch: made.loss(made.model, *batch))
    return compiled


def _of_lowtide(made: Workload, setting: Setting) -> Training:
    from bench.models.workload import plain_sgd
    from lowtide import optimize

    arena, exact, optimizer = setting.kind.endswith("arena"), not setting.kind.endswith("parts"), plain_sgd(made.model)
    if not setting.plan:
        raise ValueError(f"no plan within {setting.limit_bytes} bytes")
    step = optimize(
        made.model,
        made.batch,
        loss=made.loss,
        optimizer=optimizer,
        planning=lowtide.Planning(progress=False),
        run=lowtide.Run(arena="always" if arena else "never"),
        exact=exact,
        plan=setting.plan,
    )
    plan, report = step.plan, step.plan.cost_report
    assert report is not None
    told = {
        "limit_bytes": setting.limit_bytes,
        "promised_bytes": plan.peak_bytes - plan.resident_bytes,
        "promised_ms": report.time_us / 1e3,
        "promised_ratio": report.time_us / report.order_us,
        "recomputed": report.recomputed,
    }
    return Training(lambda: step(*made.batch), lambda: _measured_bytes(step, made.batch), told)


def checkpoint_blocks(model: Any) -> int:
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


def _measured_bytes(step: Any, batch: Any) -> int:
    """The peak of one more step, above what the caller holds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it trains is known: every setting does
        measured: int = step.measure(*batch).above_bytes
    return measured
