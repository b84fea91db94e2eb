"""A small Llama with a large vocabulary: its logits and their gradients are most of what a step makes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.models.explicit import causal_loss
from bench.models.language import language_model
from bench.models.workload import Batch, Entry, labels

_VOCABULARY, _TOKENS, _CHUNKS = 128_000, 256, 8


def chunked_loss(model: Any, tokens: Tensor) -> Tensor:
    """What people write by hand: logits and loss of some tokens at a time, made again in the backward pass."""
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    wanted = tokens[:, 1:].flatten()

    def share(rows: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model.lm_head(rows).float(), targets, reduction="sum")

    pieces = zip(hidden.chunk(_CHUNKS), wanted.chunk(_CHUNKS), strict=True)
    losses: list[Tensor] = [checkpoint(share, *piece, use_reentrant=False) for piece in pieces]
    total: Tensor = sum(losses[1:], losses[0])
    return total / wanted.numel()


def _llama() -> nn.Module:
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    return language_model("LlamaForCausalLM", "LlamaConfig", vocab_size=_VOCABULARY, tie_word_embeddings=False, **sizes)


def _texts(batch_size: int) -> Batch:
    return (labels(_VOCABULARY, batch_size, _TOKENS),)


LLAMA_128K = Entry("llama-128k", partial(_llama), _texts, causal_loss, f"4 layers of width 256, {_TOKENS} tokens of {_VOCABULARY:,}", 2)
