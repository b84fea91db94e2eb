"""What is trained: transformers' Llama from a configuration, random weights, AdamW, next-token loss; and its batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench import torchvision_shim
from bench.dynamic.lengths import LONGEST, batches

LAYERS = 4
IGNORED = -100  # as a label: padding, which the loss leaves out
SMALL = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 4000}
LLAMA_2_7B = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32_000,
}  # fmt: skip

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """So many batches of a size; the same for the same numbers."""

    batch_size: int
    steps: int
    seed: int = 0

    @property
    def lengths(self) -> list[list[int]]:
        """Of the samples of each batch, in tokens."""
        return batches(self.steps, self.batch_size, self.seed)

    @property
    def tokens(self) -> int:
        """Of all batches, without padding."""
        return sum(map(sum, self.lengths))

    def batch(self, index: int, length: int | None = None) -> Batch:
        """A batch, padded on the right to a length, or else to its longest sample. Attention is causal: no sample sees its padding."""
        lengths = self.lengths[index]
        with torch.random.fork_rng():
            torch.manual_seed(index)
            whole = torch.randint(0, SMALL["vocab_size"], (self.batch_size, LONGEST))  # the same tokens, whatever the padding
        return padded(whole[:, : length or max(lengths)], lengths)

    def heaviest(self) -> int:
        """The batch with most tokens, padding counted."""
        return max(range(self.steps), key=lambda index: max(self.lengths[index]))


def padded(tokens: Tensor, lengths: Sequence[int]) -> Batch:
    """Tokens whose ends do not count."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    is_padding = positions >= torch.tensor(lengths)[:, None]
    return {"input_ids": tokens.masked_fill(is_padding, 0), "labels": tokens.masked_fill(is_padding, IGNORED)}


def model(widths: dict[str, int] = SMALL) -> nn.Module:
    """The model in training mode; the same weights each time."""
    torchvision_shim.install()  # transformers imports torchvision where it is there
    from bench.models.language import language_model

    torch.manual_seed(0)
    made = language_model("LlamaForCausalLM", "LlamaConfig", num_hidden_layers=LAYERS, max_position_embeddings=1024, **widths)
    return made.train()


def adamw(made: nn.Module) -> torch.optim.Optimizer:
    """As fine-tuning uses it."""
    return torch.optim.AdamW(made.parameters(), lr=1e-5)


def loss(made: nn.Module, input_ids: Tensor, labels: Tensor) -> Any:
    """The mean over tokens that count."""
    return made(input_ids=input_ids, labels=labels, use_cache=False).loss
