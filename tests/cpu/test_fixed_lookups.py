"""Lookups of constants in constants are done once, when constants are prepared; those of a batch refuse what eager refuses."""

import pytest
import torch
from torch import nn

import lowtide


class Words(nn.Module):
    """Words, their positions, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(11, 16), nn.Embedding(7, 16), nn.Linear(16, 64)
        self.register_buffer("order", torch.arange(7))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.head(self.words(tokens) + self.places(self.order[:5])))


def test_a_lookup_of_constants_is_not_done_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lowtide.cpu.networks.is_faster", lambda *_: True)
    model, tokens = Words().eval().requires_grad_(False), torch.randint(0, 11, (1, 5))
    step = lowtide.optimize(model, (tokens,), exact=False)
    assert step.source.count("torch.embedding(") == 1
    assert torch.allclose(step(tokens), model(tokens), atol=1e-6)
    with torch.no_grad():
        model.order[0] = 3
    assert torch.allclose(step(tokens), model(tokens), atol=1e-6)
    with pytest.raises(IndexError):
        step(tokens + 11)
