"""Programs that run one cell many times over: repetition that is in no list of modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.models.workload import Batch, Entry

_WIDTH = 64


class Unrolled(nn.Module):
    """A recurrent cell over the steps of a sequence: scores after the last one, or after each."""

    def __init__(self, cell: nn.LSTMCell | nn.GRUCell, *, each: bool) -> None:
        super().__init__()
        self.cell, self.out, self.each = cell, nn.Linear(_WIDTH, 10), each

    def forward(self, sequence: Tensor) -> Tensor:
        state = torch.zeros(sequence.shape[0], _WIDTH)
        cell_state, states = state, []
        for step in sequence.unbind(1):
            if isinstance(self.cell, nn.LSTMCell):
                state, cell_state = self.cell(step, (state, cell_state))
            else:
                state = self.cell(step, state)
            states.append(state)
        scores: Tensor = self.out(torch.stack(states, 1) if self.each else state)
        return scores


class Denoiser(nn.Module):
    """A small network that refines its input so many times, all of which are trained through."""

    def __init__(self, steps: int, width: int = 32) -> None:
        super().__init__()
        self.steps = steps
        self.net = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, noisy: Tensor) -> Tensor:
        for _ in range(self.steps):
            noisy = noisy + 0.1 * self.net(noisy)
        return noisy


def _squares(model: nn.Module, given: Tensor) -> Tensor:
    loss: Tensor = model(given).square().mean()
    return loss


def _sequence(steps: int) -> Batch:
    return (torch.randn(16, steps, _WIDTH),)


def _lstm() -> Unrolled:
    return Unrolled(nn.LSTMCell(_WIDTH, _WIDTH), each=False)


def _gru() -> Unrolled:
    return Unrolled(nn.GRUCell(_WIDTH, _WIDTH), each=True)


LSTM_200 = Entry("lstm-200", _lstm, lambda _: _sequence(200), _squares, "an LSTM cell over 200 steps, one loss at their end")
GRU_500 = Entry("gru-500", _gru, lambda _: _sequence(500), _squares, "a GRU cell over 500 steps, a loss at each")
DIFFUSION_50 = Entry("diffusion-50", lambda: Denoiser(50), lambda rows: (torch.randn(rows, 32),), _squares, "50 steps of a small denoiser")
