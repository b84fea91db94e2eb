"""Read first: all that lowtide does, on a network small enough to follow."""

import copy

import torch
from torch import nn
from torch.nn import functional

import lowtide


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


def test_a_step_trains_as_eager_does_in_the_promised_memory():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    twin, twins_optimizer = copy.deepcopy((model, optimizer))
    batches = [(torch.randn(4, 32), torch.randint(10, (4,))) for _ in range(3)]

    # Capture the whole step and plan it. Nothing is trained yet.
    step = lowtide.optimize(model, batches[0], loss=loss, optimizer=optimizer)

    # Three steps, each against eager PyTorch from the same random state.
    for x, y in batches:
        randomness = torch.get_rng_state()
        value = step(x, y)
        torch.set_rng_state(randomness)
        twins_optimizer.zero_grad()
        expected = loss(twin, x, y)
        expected.backward()
        twins_optimizer.step()
        assert torch.equal(value, expected)
        assert all(map(torch.equal, model.parameters(), twin.parameters()))

    # The plan promised a peak below eager's, and the allocator agrees, to the byte.
    assert step.plan.peak_bytes < step.plan.eager_peak_bytes
    assert step.measure(x, y).peak_bytes == step.plan.peak_bytes
