"""A Llama of 7 billion parameters: fine-tuned whole with its state swapped, and by LoRA, within hard limits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import lowtide
from bench.on_gpu.ground import Ground, Row

LIMITS_GIB = (24, 48, 80)
_RANK, _LENGTH = 16, 512
_SEVEN = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}
_SMALL = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500}


class Adapted(nn.Module):
    """A linear layer that is not trained, and a product of two thin ones that is (LoRA)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        where = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        self.layer = layer
        self.down = nn.Linear(layer.in_features, _RANK, bias=False, **where)
        self.up = nn.Linear(_RANK, layer.out_features, bias=False, **where)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x) + self.up(self.down(x))
        return made


def rows(what: str, limit_gib: int, ground: Ground) -> Iterator[Row]:
    """Planned, then run for three steps where the device has the memory; the limit is the allocator's own, too."""
    model = _model(ground, adapted=what == "LoRA")
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-5, foreach=False)
    tokens = torch.randint(0, model.config.vocab_size, (1, 16 if ground.dry else _LENGTH), device=ground.device)
    limit: Any = "90%" if ground.dry else limit_gib * 2**30  # on a CPU nothing is swapped: what is resident is most of it
    clock = time.perf_counter()
    step = lowtide.optimize(
        model, {"input_ids": tokens, "labels": tokens}, loss=lambda m, **batch: m(**batch, use_cache=False).loss, optimizer=optimizer,
        memory=limit,
        run=lowtide.Run(state="swap" if what == "whole" and ground.on_gpu else "device"), planning=lowtide.Planning(progress=False),
    )  # fmt: skip
    found = {"setting": f"{what}, {limit_gib} GiB", "seconds": time.perf_counter() - clock, "promised_bytes": step.plan.peak_bytes}
    if not ground.dry:
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * 2**30 / torch.cuda.get_device_properties(0).total_memory))
    call = lambda: step(input_ids=tokens, labels=tokens)  # noqa: E731
    yield found | {
        "verdict": "runs",
        "measured_bytes": ground.above_bytes(call, step.empty_arena),
        "reserved_bytes": ground.reserved_bytes(call),
        "step_ms": ground.in_turns_ms({"": call}, 3)[""],
    }


def _model(ground: Ground, adapted: bool) -> Any:
    from bench import torchvision_shim

    torchvision_shim.install()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = _SMALL if ground.dry else _SEVEN
    with torch.device(ground.device):
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes))
    model.to(torch.bfloat16)
    if not adapted:
        return model
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = Adapted(layer.self_attn.q_proj), Adapted(layer.self_attn.v_proj)
    return model
