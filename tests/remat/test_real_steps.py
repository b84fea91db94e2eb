"""Whatever times a machine measures, all that a search finds for a real step is a right sequence."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from lowtide.capture.program import TrainingProgram, capture_training
from lowtide.capture.trace import Given
from lowtide.cost.presets import preset
from lowtide.remat.cost import cost_of, first_wrong
from lowtide.remat.problem import RematProblem
from lowtide.remat.pruning import prompt
from lowtide.remat.seeds import Seeds
from lowtide.remat.sweep import Sweep
from lowtide.remat.write_out import rematerialise
from tests.api.networks import Gpt, adamw, next_token, squares


def _gpt():
    return Gpt(), (torch.randint(0, 50, (4, 32)),), next_token


class _Bottleneck(nn.Module):
    def __init__(self):
        super().__init__()
        wide = [nn.Conv2d(8, 32, 1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32)]
        self.inner = nn.Sequential(*wide, nn.SiLU(), nn.Conv2d(32, 8, 1))

    def forward(self, x):
        return x + self.inner(x)


def _convolutions():
    return nn.Sequential(*[_Bottleneck() for _ in range(6)]), (torch.randn(4, 8, 16, 16),), squares


@pytest.fixture(scope="module", params=[(_gpt, False), (_gpt, True), (_convolutions, False)], ids=["gpt", "gpt in halves", "convolutions"])
def graph(request):
    build, half = request.param
    torch.manual_seed(0)
    model, batch, loss = build()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        return capture_training(TrainingProgram(model, loss, adamw(model), None, 1), Given(batch, {}, torch.device("cpu")))[-1].graph


def _timed(graph, seed, spread, **settings):
    """The step's problem with times of some fractions of a microsecond, whose logarithms scatter by `spread`; and an order."""
    times = 0.2 * np.exp(np.random.default_rng(seed).normal(0, spread, len(graph.nodes)))
    problem = RematProblem.of(graph, times.tolist(), **settings)
    return problem, prompt(problem, problem.sequence_of(np.arange(len(graph.nodes))))


@pytest.mark.parametrize("seed", range(6))
def test_seeds_are_right_sequences(graph, seed):
    problem, order = _timed(graph, seed, (0.01, 0.3, 1.0)[seed % 3])
    levels = np.linspace(cost_of(problem, order).peak_bytes, problem.problem.resident_bytes, 8).astype(int).tolist()
    found = list(Seeds().of(problem, order, levels))
    assert found
    for sequence in found:
        assert first_wrong(problem, sequence) == -1
        assert set(sequence) == set(order)


@pytest.mark.parametrize("swap", [None, replace(preset("rtx3090"), launch_us=0.01)], ids=["recompute", "swap"])
def test_all_that_a_search_finds_can_be_written_out(graph, swap):
    problem, order = _timed(graph, 0, 0.3, swap=swap)
    archive = Sweep(levels=8, max_states=400).explore([problem], [[order]])
    assert len(archive.points) > 2
    for point in archive.points:
        assert first_wrong(problem, point.sequence) == -1
        rematerialise(graph, point.sequence.tolist())


def test_the_decay_of_weights_forbids_no_repetition():
    """It waits for no gradient, and writes what the forward pass alone reads: the biases of convolutions."""
    model, batch, loss = _convolutions()
    program = TrainingProgram(model, loss, torch.optim.AdamW(model.parameters(), foreach=False), None, 1)
    graph = capture_training(program, Given(batch, {}, torch.device("cpu")))[-1].graph
    problem = RematProblem.of(graph, [1.0] * len(graph.nodes))
    order = prompt(problem, problem.sequence_of(range(len(graph.nodes))))
    leanest = Sweep(max_states=300).explore([problem], [[order]]).points[0].peak_bytes
    assert leanest - problem.problem.resident_bytes < 0.5 * (cost_of(problem, order).peak_bytes - problem.problem.resident_bytes)
