"""Views of another dtype: one memory read and written as numbers of two kinds, as optimizers do with complex parameters."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from tests.training import check


class Spectral(nn.Module):
    """A layer of a Fourier neural operator, and a state-space kernel whose poles are kept as pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 5, dtype=torch.cfloat) * 0.3)
        self.poles = nn.Parameter(torch.randn(4, 2) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        lines = torch.einsum("bim,iom->bom", torch.fft.rfft(x), self.weight)
        kernel = torch.exp(torch.view_as_complex(self.poles)[:, None] * torch.arange(8)).real
        return torch.fft.irfft(lines, n=8) * kernel


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda params: optim.SGD(params, 0.1, momentum=0.9),
    "Adam": lambda params: optim.Adam(params, 0.01, amsgrad=True),
    "AdamW": lambda params: optim.AdamW(params, 0.01),
    "RMSprop": lambda params: optim.RMSprop(params, 0.001, momentum=0.9, centered=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_complex_parameters(name: str) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        model = Spectral()
        return model, torch.randn(3, 4, 8), lambda model, x: model(x).square().mean(), OPTIMIZERS[name](model.parameters())

    check(make)


def test_a_buffer_written_as_another_kind() -> None:
    class Net(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("seen", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            bits = self.seen.view(torch.int32)  # type: ignore[operator]
            bits[1:3].add_(1 << 20)
            torch.view_as_complex(self.seen.view(3, 2))[2:].add_(1j)  # type: ignore[operator]
            self.seen[:1].add_(bits[1:2].float())  # type: ignore[index]
            return super().forward(x) * self.seen.sum()

    def make() -> Any:
        torch.manual_seed(0)
        model = Net()
        return model, torch.randn(3, 4), lambda model, x: model(x).square().mean(), optim.SGD(model.parameters(), 1e-9)

    check(make)


class Mixed(nn.Module):
    """Reads and writes one tensor as real and as complex, all of it or parts, as a number says."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer, self.seed = nn.Linear(8, 8), seed

    def forward(self, x: Tensor) -> Tensor:
        choose = random.Random(self.seed)
        lines = torch.fft.rfft(self.layer(x))
        lines = lines.transpose(0, 1).clone() if choose.random() < 0.5 else lines * 1
        pairs, early = torch.view_as_real(lines), lines[1:]
        for _ in range(5):
            kind = choose.randrange(5)
            if kind == 0:
                pairs[..., choose.randrange(2)].mul_(0.5)
            elif kind == 1:
                pairs.add_(0.25)
            elif kind == 2:
                lines[choose.randrange(2) :].mul_(0.5 + 0.25j)
            elif kind == 3:
                pairs[1:, :2] = torch.view_as_real(early.clone())[:1, :2] * 0.5
            else:
                lines += torch.view_as_complex(pairs * 1)
        return torch.cat([pairs.flatten(), torch.view_as_real(early * 1).flatten()])


@pytest.mark.parametrize("seed", range(5))
def test_random_reads_and_writes(seed: int) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        model = Mixed(seed)
        return model, torch.randn(3, 8), lambda model, x: model(x).square().mean(), optim.SGD(model.parameters(), 0.01)

    check(make, steps=2)


def test_over_a_range_of_batches() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        model = Mixed(2)
        return model, torch.randn(3, 8), lambda model, x: model(x).square().sum(), optim.SGD(model.parameters(), 0.01)

    check(make, steps=2, options={"dynamic": {0: {0: ("rows", 3, 6)}}})
