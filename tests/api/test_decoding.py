"""Decoding with a cache of fixed length: transformers' own, held by a module, is written as buffers are, and the logits are eager's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lowtide
from bench import torchvision_shim
from bench.bits import same_bits


class Decoding(nn.Module):
    """A small Llama and its cache."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        torchvision_shim.install()
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
        self.cache = transformers.StaticCache(config=self.model.config, max_cache_len=longest)
        self.cache.early_initialization(1, 4, 8, torch.float32, torch.device("cpu"))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        answer = self.model(input_ids=tokens, position_ids=positions[None], past_key_values=self.cache, use_cache=True)
        logits: Tensor = answer.logits[:, -1]
        return logits


def generate(decoding: Decoding, forward: object, prompt: Tensor, count: int) -> Tensor:
    """The logits of so many tokens, each the likeliest."""
    assert callable(forward)
    decoding.cache.reset()
    tokens, positions, found = prompt, torch.arange(prompt.shape[1]), list[Tensor]()
    for _ in range(count):
        found.append(forward(tokens, positions).clone())
        tokens, positions = found[-1].argmax(-1, keepdim=True), positions[-1:] + 1
    return torch.cat(found)


def test_a_static_cache_is_written_as_buffers_are():
    decoding = Decoding(24)
    prompts = [torch.randint(0, 50, (1, length)) for length in (9, 4, 9)]
    step = lowtide.optimize(
        decoding, (prompts[0], torch.arange(9)), shapes=lowtide.Shapes(on_new_shape="extend"), planning=lowtide.Planning(progress=False)
    )
    for prompt in prompts:
        with torch.no_grad():
            expected = generate(decoding, decoding, prompt, 8)
        assert same_bits(generate(decoding, step, prompt, 8), expected)
