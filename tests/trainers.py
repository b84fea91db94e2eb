"""A small Llama, rows for it, and training by transformers' Trainer: what several tests of integrations need."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench import torchvision_shim

torchvision_shim.install()  # transformers imports torchvision

ROWS = 10
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "step", "epoch")


def llama(dropout: float = 0.1) -> nn.Module:
    """One layer, the same at each call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            attention_dropout=dropout,
        )
    )  # fmt: skip


def rows(varying: bool = False, count: int = ROWS) -> list[dict[str, list[int]]]:
    """Texts of random tokens, of one length or of several."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        length = int(torch.randint(5, 12, (1,), generator=generator)) if varying else 8
        tokens = torch.randint(0, 64, (length,), generator=generator).tolist()
        found.append({"input_ids": tokens, "labels": tokens, "attention_mask": [1] * length})
    return found


def collate(texts: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Padded to the longest."""
    longest = max(len(text["labels"]) for text in texts)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {name: torch.tensor([text[name] + [pad] * (longest - len(text[name])) for text in texts]) for name, pad in fill.items()}


def trainer(kind: Any, model: nn.Module, folder: Path, said: dict[str, Any] | None = None, *, varying: bool = False, **given: Any) -> Any:
    """A Trainer that logs every step; `said` goes into its arguments."""
    from transformers import TrainingArguments

    usual = {"per_device_train_batch_size": 2, "num_train_epochs": 1, "logging_steps": 1, "save_strategy": "no", "warmup_steps": 2}
    quiet = {"report_to": [], "use_cpu": True, "optim": "adamw_torch", "disable_tqdm": True, "learning_rate": 1e-2}
    arguments = TrainingArguments(str(folder), **{**usual, **quiet, **(said or {})})
    return kind(model, arguments, train_dataset=rows(varying), data_collator=collate, **given)


def outcome(done: Any) -> dict[str, Any]:
    """All that training has left."""
    history = [{name: entry[name] for name in LOGGED if name in entry} for entry in done.state.log_history]
    optimizer = done.optimizer.state_dict()
    return copy.deepcopy(
        {
            "logs": history, "model": dict(done.model.state_dict()), "optimizer": optimizer, "generator": torch.get_rng_state(),
            "scheduler": done.lr_scheduler.state_dict()["last_epoch"], "steps": done.state.global_step,
        }
    )  # fmt: skip
