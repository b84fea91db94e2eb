"""Calls each kernel that a first step may need, with the types that it needs: what is compiled meanwhile goes into a wheel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import lowtide
from lowtide.planning.warm_up import warm_up_planning
from lowtide.problems.order import OrderProblem, Rows, Task
from lowtide.remat import ahead
from lowtide.remat.cost import cost_of
from lowtide.remat.problem import RematProblem
from lowtide.schedule import Auto


def main() -> None:
    torch.manual_seed(0)
    warm_up_planning(Auto(), limited=True)
    _loads_ahead()
    _trained(_text(), torch.randint(0, 50, (4, 16)), torch.optim.AdamW, "70%")
    _trained(_images(), torch.randn(4, 3, 32, 32), lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9), None)
    network = _images().eval()
    with torch.no_grad():
        lowtide.optimize(network, torch.randn(1, 3, 32, 32), exact=False)(torch.randn(1, 3, 32, 32))
        memories = [lowtide.Space("fast", 2**14, 2e9, 2e9), lowtide.Space("slow", None, 1e9, 1e9)]
        lowtide.plan_edge(lowtide.network(network, (torch.randn(1, 3, 32, 32),)), memories, cut=True)


def _loads_ahead() -> None:
    """No search of a small network comes to loads that could begin earlier."""
    chain, limits = OrderProblem.of([1, 1], [Task("", (0,)), Task("", (1,), (0,))]), Rows(np.zeros(3, np.int32), np.zeros(0, np.int32))
    problem = RematProblem(chain, np.ones(2), np.zeros(2, np.bool_), np.ones(2, np.bool_), limits)
    sequence = problem.sequence_of(np.arange(2))
    ahead._ahead(sequence, cost_of(problem, sequence).footprint_bytes, 2, 2, problem.facts)


def _text() -> nn.Module:
    layers = (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="relu") for _ in range(4))
    return nn.Sequential(nn.Embedding(50, 32), *layers, nn.Linear(32, 50))


def _images() -> nn.Module:
    blocks = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)) for _ in range(3))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), *blocks, nn.Flatten(), nn.Linear(8 * 16, 10), nn.GELU())


def _trained(model: nn.Module, batch: torch.Tensor, optimizer: Callable[[Any], torch.optim.Optimizer], limit: str | None) -> None:
    """Within a limit, which a search keeps, and with an arena, where addresses are found."""
    for memory, arena in ((limit, "never"), (None, "auto")):
        twin = copy.deepcopy(model)
        run = lowtide.Run(arena=arena)
        step = lowtide.optimize(twin, batch, loss=_loss, optimizer=optimizer(twin.parameters()), memory=memory, run=run)
        for _ in range(3):
            step(batch)


def _loss(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).square().mean()


if __name__ == "__main__":
    main()
